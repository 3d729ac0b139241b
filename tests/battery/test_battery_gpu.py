"""Run the battery of hostile problems on a GPU, with generic and with specialised kernels."""

from __future__ import annotations

import sys

import pytest

from cunorm.jit.sources import TEXTS
from cunorm.ops.registry import OPS
from cunorm.runtime import specialised
from tests.battery import cases as battery
from tests.battery.case import Case, forget

#: Cases per test: few, so that the workers of a parallel run are busy for equally long.
CHUNK = 8

CHUNKS: list[tuple[str, list[Case]]] = [
    (f"{op}-{strategy}-{start // CHUNK}", found[start : start + CHUNK])
    for op, known in OPS.items()
    for strategy in known.strategies
    for found in [battery.cases(op, strategy)]
    for start in range(0, len(found), CHUNK)
]


@pytest.fixture(params=TEXTS)
def _text(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run one of the kernels' texts from the first call on."""
    monkeypatch.setenv("CUNORM_SPECIALISE", "never" if request.param == "generic" else "always")
    monkeypatch.setattr(specialised, "MOST_KERNELS", sys.maxsize)
    forget()


@pytest.mark.gpu
@pytest.mark.usefixtures("_text")
@pytest.mark.parametrize("cases", [cases for _, cases in CHUNKS], ids=[name for name, _ in CHUNKS])
def test_results_are_correct_and_repeatable(cases: list[Case]) -> None:
    wrong = []
    for case in cases:
        try:
            first, second = case.run("gpu"), case.run("gpu")
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
            continue
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            if one is not None and other is not None and one.tobytes() != other.tobytes():
                wrong.append(f"{case}: result {index} differs in a second run")
    assert not wrong, "\n".join(wrong)


def test_cases_for_the_sanitizer_can_be_selected(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from tests.battery import one_per_kernel

    assert one_per_kernel.main(["--list"]) == 0
    every = capsys.readouterr().out.splitlines()
    assert one_per_kernel.main(["--list", "--only", "^rms_norm-(warp|block):"]) == 0
    some = capsys.readouterr().out.splitlines()
    assert some == [one for one in every if one.startswith(("rms_norm-warp:", "rms_norm-block:"))] != []
    with pytest.raises(SystemExit, match="2"):
        one_per_kernel.main(["--list", "--only", "rms_norms"])
    assert "--only: 'rms_norms' matches no case; --list names them" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        one_per_kernel.main(["--list", "--only", "rms_norm("])
    assert "--only: 'rms_norm(' is no regular expression: missing )" in capsys.readouterr().err
