"""A simulator of the machine code that a GPU executes: it runs kernels without a GPU and counts and times their work.

From the bottom up:

- `cubin`: NVRTC compiles a kernel's text with the options that users run; nvdisasm disassembles it.
- `records`: the instruction of the engine, as a C struct.
- `decode`: turns disassembled instructions into records. It raises for an instruction that it does not know.
- ``engine/``: C++ that executes records: registers, predicates, convergence, memory, barriers; and the clock.
- `machine`: compiles the engine, describes launches, runs them, and translates faults.
- `clock`: the facts of each GPU, and launches on the simulated clock.
- `calls`: the launches of a plan; a context in which calls of the library run on the simulator.
- `problems`: a problem on the clock, instructions per element and by source line.
- `probes`: a copy and a sum, whose times follow from the DRAM's bandwidth.
- ``peers/``: PyTorch's and Liger's calls on the simulator, published times, calibration and comparison.
- `simulated_page`: the stored results, docs/speed/simulated.md and its picture.
"""
