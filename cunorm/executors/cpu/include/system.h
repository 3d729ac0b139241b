// The C library, for the runtime's object. Kernels do not need it, and compile sooner without it.

#undef _GNU_SOURCE  // see runtime.h
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

extern "C" int getpid() noexcept;       // <unistd.h> would declare names that kernels define
extern "C" int sched_yield() noexcept;  // <sched.h> declares it only with extensions
