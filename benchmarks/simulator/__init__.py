"""A simulator of the machine code that a GPU executes: it runs kernels without a GPU and counts and times their work.

From the bottom up:

- `cubin`: NVRTC compiles a kernel's text with the options that users run; nvdisasm disassembles it.
- `records`: the instruction of the engine, as a C struct.
- `decode`: turns disassembled instructions into records. It raises for an instruction that it does not know.
- ``engine/``: C++ that executes records: registers, predicates, convergence, memory, barriers.
- `machine`: compiles the engine, holds the memory of the simulated GPU, and runs launches.
- `calls`: runs the launches of a plan on arrays of test values, and compares the results with the oracle of the op.
"""
