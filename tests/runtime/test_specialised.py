"""Specialised kernels: their texts, their bits, and the policy that says which calls run them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core.errors import CompileError, KernelFault
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile
from cunorm.executors.cpu import executor as cpu
from cunorm.gate import gate
from cunorm.jit import cubins, sources
from cunorm.runtime import plans, specialised
from cunorm.runtime.specialised import CALLS
from tests.support.covering import every
from tests.support.problems import TILES, forget_calls

SHAPE: dict[str, Any] = {"shape": (2, 320, 64, 64), "dtype": "bfloat16", "num_groups": 32, "device": "H200"}
#: Seconds for the builder's thread.
PATIENCE = 60


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plans, "_plans", {})
    forget_calls()
    yield
    forget_calls()


def finished() -> None:
    """Wait until the builder has done all its jobs."""
    done = threading.Event()
    specialised.builder().submit(done.set)
    assert done.wait(PATIENCE)


# ---- texts ----------------------------------------------------------------------------------------------------------


def launched(dtype: str) -> Iterator[tuple[Launch, Problem, Strategy, Tile]]:
    """Launches of every strategy of every op and layout."""
    for case in (one for one in gate.cases() if one.dtype == dtype):
        for problem, tile in gate.spread(case, "sm_90")[:1]:
            for launch in case.solver.launches(problem, tile):
                yield launch, problem, case.solver, tile


def test_a_specialised_text_has_the_sizes_as_constants() -> None:
    plan = cunorm.plan("group_norm", **SHAPE)
    (text, entry), *_ = plan.texts("specialised")
    (generic, _), *_ = plan.texts("generic")
    body = text[text.index(f"{entry}(") :]
    head = body[: body.index("\n", body.index("{"))]
    for fact in ("long long const C = 320LL;", "long long const HxW = 4096LL;", "long long const groups = 32LL;"):
        assert fact in head
    assert "const gamma_t* const gamma = nullptr;" in head  # the plan has no gamma
    assert "CUNORM_ALIGNED(x);" in head
    assert "long long N," in " ".join(head.split())  # free: a text serves every N
    assert text.count("\n") == generic.count("\n")  # messages keep their line numbers


def test_plans_that_differ_in_n_share_their_specialised_texts() -> None:
    first = cunorm.plan("group_norm", **{**SHAPE, "shape": (7, 64, 20, 20)})
    second = cunorm.plan("group_norm", **{**SHAPE, "shape": (9, 64, 20, 20), "tile": first.tile})
    assert first.texts("specialised") == second.texts("specialised")
    other = cunorm.plan("group_norm", **{**SHAPE, "shape": (7, 64, 20, 21), "tile": first.tile})
    assert first.texts("specialised") != other.texts("specialised")


def test_an_array_that_is_absent_for_one_sample_only() -> None:
    """The gradients of the parameters of one sample need no workspace."""
    plan = cunorm.plan("group_norm_backward", **{**SHAPE, "shape": (1, 320, 64, 64)})
    assert plan.launches[0].arguments["workspace"] == 0
    (text, _), *_ = plan.texts("specialised")
    assert "Pair* const workspace = nullptr;" in text
    assert "CUNORM_ALIGNED(workspace)" not in text


@pytest.mark.parametrize("dtype", every(4, ("bfloat16", "float16", "float32", "float64")))
def test_every_kernel_has_a_specialised_text_of_the_same_parameters(dtype: str) -> None:
    entries = set()
    for launch, problem, strategy, tile in launched(dtype):
        fixed = sources.fixed_arguments(launch, problem, strategy, tile)
        text = sources.kernel_text(launch, problem, strategy, tile, "specialised")
        for name, value in fixed.items():
            assert f" const {name} = {'nullptr' if f'* const {name} = nullptr' in text else f'{value}LL'};" in text
        assert not {"N", "rows"} & fixed.keys() or launch.arguments.get("N", 1) == 1  # channels-last samples are joined
        entries.add(launch.entry)
    assert len(entries) > 30


def test_the_specialised_text_is_built_for_the_executor_as_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_SPECIALISE", "sometimes")
    with pytest.raises(ValueError, match=r"^CUNORM_SPECIALISE: 'sometimes', expected background, always or never$"):
        cunorm.plan("group_norm", **SHAPE)


# ---- bits, on the CPU executor --------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "group_norm": ("group_norm", {"shape": (3, 24, 5, 7), "num_groups": 3}),
    "group_norm_backward": ("group_norm_backward", {"shape": (3, 24, 5, 7), "num_groups": 3}),
    "layer_norm": ("layer_norm", {"shape": (6, 260), "normalized_shape": 260}),
    "layer_norm_backward": ("layer_norm_backward", {"shape": (6, 260), "normalized_shape": 260}),
}


def called(name: str, misaligned: bool = False) -> tuple[cunorm.Plan, list[Any]]:
    """A plan, and arrays for it in which x starts one element after a multiple of 16 bytes."""
    op, options = CASES[name]
    plan = cunorm.plan(op, dtype="float16", gamma_dtype="float32", **options)
    random = np.random.default_rng(0)
    arrays: list[Any] = []
    for array, spec in plan.problem.spec.inputs.items():
        if not plan.problem.has(array):
            arrays.append(None)
            continue
        shape = options["shape"] if spec.tensor else _shape(plan.problem, array)
        whole = (1 + random.random(int(np.prod(shape)) + 1)).astype(plan.problem.dtype_of(array))
        at = int(misaligned and array == "x")
        arrays.append(whole[at : at + whole.size - 1].reshape(shape))
    return plan, arrays


def _shape(problem: Problem, array: str) -> tuple[int, ...]:
    if problem.op.startswith("layer_norm"):
        return (problem.C,) if array in ("gamma", "beta") else (problem.N, 1)
    return (problem.C,) if array in ("gamma", "beta") else (problem.N, problem.group)


@pytest.mark.parametrize("name", CASES)
def test_both_texts_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, arrays = called(name)
    assert "kernels    generic: on the CPU executor" in plan.explain()
    wanted = plan(*arrays)
    monkeypatch.setattr(plans, "_plans", {})
    forget_calls()
    monkeypatch.setenv("CUNORM_SPECIALISE", "always")
    plan, arrays = called(name)
    assert plan._specialised.steps is None
    found = plan(*arrays)
    assert plan._specialised.steps is not None or name.startswith("layer")
    assert "kernels    specialised" in plan.explain()
    for one, other in zip(found, wanted, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_both_texts_give_the_same_bits_of_a_long_piece(activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has 36 packs of the piece that stays on the chip: more than a chain of additions contains."""
    tile = Tile("grid", chunk=72, groups=32, keep="shared", prefetch_tiles=1, threads=128)
    x = np.random.default_rng(0).normal(3, 1, (1, 144, 256)).astype(np.float32)
    mean, rstd, gamma, beta = x[0, 2, :32], x[0, 3, :32], x[0, 0], x[0, 1]
    options: dict[str, Any] = {"beta": beta if activation else None, "data_format": "NHWC", "activation": activation}
    found = []
    for mode in ("never", "always"):
        monkeypatch.setenv("CUNORM_SPECIALISE", mode)
        monkeypatch.setattr(plans, "_plans", {})
        forget_calls()
        dy = x[:, ::-1].copy()
        found.append(cunorm.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=32, tile=tile, **options))
    for name, *both in zip(("dx", "dgamma", "dbeta"), *found, strict=True):
        np.testing.assert_array_equal(*both, err_msg=name)


def test_a_call_with_a_misaligned_array_runs_the_generic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_SPECIALISE", "always")
    plan, arrays = called("group_norm_backward", misaligned=True)
    plan.compile()
    runs: list[Any] = []
    run = cpu.run
    monkeypatch.setattr(cpu, "run", lambda steps, *rest, **more: (runs.append(steps), run(steps, *rest, **more))[1])
    plan(*arrays)
    plan(*called("group_norm_backward")[1])
    assert [steps is plan._specialised.steps for steps in runs] == [False, True]
    assert "generic if an array does not start at a multiple of 16 bytes" in plan.explain()


def test_running_statistics_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem is the same with and without them."""
    random = np.random.default_rng(0)
    mean, invstd = (1 + random.random((2, 8), np.float32) for _ in range(2))
    running = [np.ones(8, np.float32) for _ in range(2)]
    found = []
    for mode in ("never", "always"):
        monkeypatch.setenv("CUNORM_SPECIALISE", mode)
        for given in ((None, None), running):
            monkeypatch.setattr(plans, "_plans", {})
            forget_calls()
            kept = [None if one is None else one.copy() for one in given]
            options = dict(zip(("running_mean", "running_var"), kept, strict=True))
            results = cunorm.batch_norm_gather_stats(mean, invstd, np.full(2, 16), **options)
            found.append([one.tobytes() for one in (*results, *kept) if one is not None])
    assert found[:2] == found[2:]


def test_the_cpu_executor_checks_what_a_specialised_kernel_assumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_SPECIALISE", "always")
    plan, arrays = called("group_norm_backward", misaligned=True)
    plan.compile()
    monkeypatch.setattr(plans.Plan, "assumes", lambda *_: True)
    with pytest.raises(KernelFault, match=r"x is at 0x[0-9a-f]+, but a specialised kernel expects a multiple of 16 b"):
        plan(*arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_both_texts_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    found = []
    for mode in ("never", "always"):
        monkeypatch.setenv("CUNORM_SPECIALISE", mode)
        for misaligned in (False, True):
            monkeypatch.setattr(plans, "_plans", {})
            forget_calls()
            _, arrays = called(name)
            plan = cunorm.plan(CASES[name][0], dtype="float16", gamma_dtype="float32", device=0, **CASES[name][1])
            moved = [None if one is None else placed(cupy, one, misaligned) for one in arrays]
            found.append([cupy.asnumpy(one).tobytes() for one in plan(*moved)])
    assert found[0] == found[2]
    assert found[1] == found[3]


def placed(xp: Any, array: np.ndarray, misaligned: bool) -> Any:
    """A copy of an array, one element after a multiple of 16 bytes if misaligned."""
    whole = xp.empty(array.size + 1, array.dtype)
    moved = whole[int(misaligned) :][: array.size].reshape(array.shape)
    moved[...] = xp.asarray(array)
    return moved


# ---- the policy, on a fake GPU --------------------------------------------------------------------------------------


def given(driver: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = {"x": driver.array((2, 8, 4, 4)), "gamma": driver.array((8,))}
    out = (driver.array((2, 8, 4, 4)), driver.array((2, 2)), driver.array((2, 2)))
    return arrays, {"num_groups": 2, "out": out, "tile": TILES["block"]}


def call(driver: Any, arrays: dict[str, Any], options: dict[str, Any]) -> str:
    """Call group_norm; return the text of the kernel that ran."""
    cunorm.group_norm(**arrays, **options)
    return "specialised" if "machine code" in driver.launched[-1] else "generic"


def plan_on_gpu() -> cunorm.Plan:
    (plan,) = plans._plans.values()
    return plan


def test_a_thread_compiles_the_specialised_kernels_after_some_calls(driver: Any) -> None:
    arrays, options = given(driver)
    for _ in range(CALLS):
        assert driver.built == []
        assert call(driver, arrays, options) == "generic"
        assert "generic in the first 8 calls" in plan_on_gpu().explain()
    finished()
    assert [entry for _, entry in driver.built] == ["group_norm_block"]
    assert "HxW = 16LL" in driver.built[0][0]
    assert len(driver.compiled) == 1  # nothing was loaded by the thread
    assert call(driver, arrays, options) == "specialised"
    assert "kernels    specialised; generic if" in plan_on_gpu().explain()
    assert driver.launches[0] == driver.launches[-1]  # with another kernel


def test_a_problem_that_occurs_a_few_times_is_not_specialised(driver: Any) -> None:
    arrays, options = given(driver)
    for _ in range(CALLS - 1):
        call(driver, arrays, options)
    finished()
    assert driver.built == []


def test_a_misaligned_slice_runs_the_generic_kernel(driver: Any) -> None:
    arrays, options = given(driver)
    for _ in range(CALLS):
        call(driver, arrays, options)
    finished()
    assert call(driver, arrays, options) == "specialised"
    gamma = driver.array((9,))[1:]
    assert call(driver, {**arrays, "gamma": gamma}, options) == "generic"
    assert call(driver, arrays, options) == "specialised"


def test_no_code_is_loaded_while_a_stream_is_captured(driver: Any) -> None:
    arrays, options = given(driver)
    for _ in range(CALLS):
        call(driver, arrays, options)
    finished()
    driver.capturing = True
    for _ in range(3):
        assert call(driver, arrays, options) == "generic"
    driver.capturing = False
    assert call(driver, arrays, options) == "specialised"
    driver.capturing = True  # a loaded kernel may be captured
    assert call(driver, arrays, options) == "specialised"


@pytest.mark.parametrize("mode", ["background", "always"])
def test_compile_compiles_both_texts(mode: str, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_SPECIALISE", mode)
    plan = cunorm.plan("group_norm", shape=(2, 8, 4, 4), dtype="float32", num_groups=2, device=0, tile=TILES["block"])
    plan.compile()
    assert ["machine code" in code for code, *_ in driver.compiled] == [False, True]
    plan.compile()
    assert len(driver.compiled) == 2


def test_always_and_never(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, options = given(driver)
    monkeypatch.setenv("CUNORM_SPECIALISE", "always")
    assert call(driver, arrays, options) == "specialised"
    monkeypatch.setattr(plans, "_plans", {})
    forget_calls()
    monkeypatch.setenv("CUNORM_SPECIALISE", "never")
    for _ in range(2 * CALLS):
        assert call(driver, arrays, options) == "generic"
    finished()
    assert len(driver.built) == 1
    assert "kernels    generic: CUNORM_SPECIALISE is never" in plan_on_gpu().explain()


def broken(text: str, entry: str, options: tuple[str, ...]) -> bytes:
    raise CompileError(f"{entry}: error: too many registers")


def test_kernels_that_do_not_compile_leave_the_generic_ones(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cunorm.executors.gpu._machine_code", broken)
    arrays, options = given(driver)
    for _ in range(CALLS):
        call(driver, arrays, options)
    finished()
    assert call(driver, arrays, options) == "generic"
    sentence = "kernels    generic: the specialised kernels do not compile: group_norm_block: error: too many registers"
    assert sentence in plan_on_gpu().explain()
    plan_on_gpu().compile()  # is no error either
    monkeypatch.setattr(plans, "_plans", {})
    forget_calls()
    monkeypatch.setenv("CUNORM_SPECIALISE", "always")
    with pytest.raises(CompileError, match="too many registers"):
        call(driver, arrays, options)


def test_kernels_that_do_not_load_leave_the_generic_ones(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, options = given(driver)
    for _ in range(CALLS):
        call(driver, arrays, options)
    finished()
    monkeypatch.setattr("cupy.RawModule", lambda **_: 1 / 0)
    assert call(driver, arrays, options) == "generic"
    assert "the specialised kernels do not load: division by zero" in plan_on_gpu().explain()


def test_a_process_loads_a_bounded_number_of_specialised_kernels(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialised, "MOST_KERNELS", 1)
    monkeypatch.setenv("CUNORM_SPECIALISE", "background")
    made = [
        cunorm.plan("group_norm", shape=(2, 8, 4, width), dtype="float32", num_groups=2, device=0, tile=TILES["block"])
        for width in (4, 5)
    ]
    for plan in made:
        plan.compile()
    assert ["kernels    specialised" in plan.explain() for plan in made] == [True, False]
    assert "generic: 1 specialised kernels are loaded, the most that a process keeps" in made[1].explain()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_has_a_builder_of_its_own() -> None:
    finished()
    child = os.fork()
    if child == 0:
        done = threading.Event()
        specialised.builder().submit(done.set)
        os._exit(0 if done.wait(PATIENCE) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_ends_after_the_compilation_that_it_is_in() -> None:
    builder, started, go, done = specialised.Builder(), threading.Event(), threading.Event(), []
    builder.submit(lambda: (started.set(), go.wait(PATIENCE), done.append("first"))[0])
    builder.submit(lambda: done.append("second"))
    assert started.wait(PATIENCE)
    threading.Timer(0.05, go.set).start()
    builder.close()
    assert done == ["first"]


# ---- the files ------------------------------------------------------------------------------------------------------


def test_machine_code_is_cached_by_text_options_and_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "cache"))
    compiled: list[str] = []

    def made(text: str, options: tuple[str, ...] = ("-arch=sm_90",), version: str = "13.5") -> Path:
        return cubins.cached(text, options, version, lambda: (compiled.append(text), text.encode())[1])

    first = made("a")
    assert first.read_bytes() == b"a"
    assert made("a") == first
    others = {made("b"), made("a", ("-arch=sm_100",)), made("a", version="12.8")}
    assert len({first} | others) == 4
    assert compiled == ["a", "b", "a", "a"]
    first.chmod(0o666)  # another user may have written it
    made("a")
    assert compiled == ["a", "b", "a", "a", "a"]


def test_the_oldest_machine_code_is_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cubins, "MOST_FILES", 8)
    made = [cubins.cached(str(k), (), "", lambda: b"code") for k in range(8)]
    for age, file in enumerate(made):
        os.utime(file, (1000 + age, 1000 + age))
    cubins.cached("0", (), "", lambda: b"code")  # used: now the newest
    cubins.cached("8", (), "", lambda: b"code")
    assert [file.exists() for file in made] == [True, False, False, *[True] * 5]
