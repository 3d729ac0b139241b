// The CPU executor's operating-system threads. They live inside one call from the interpreter: whatever is raised there,
// by whatever signal, no thread of a launch runs when the call is over. The threads beside the calling one never touch
// the interpreter.

namespace cunorm_cpu {

// Functions of Python's C interface, whose headers a kernel does without (cunorm/executors/cpu/kernel.py).
struct Interpreter {
    void* (*let_go)();          // PyEval_SaveThread: other threads of the interpreter may run
    void (*take)(void* state);  // PyEval_RestoreThread
    int (*check_signals)();     // PyErr_CheckSignals: -1 if a handler raised; the exception waits for the call's end
};

constexpr long long look_nanoseconds = 50000000;  // from one look at signals to the next
constexpr size_t thread_stack_bytes = 1 << 20;    // kernels have stacks of their own

// Standard C's only clock; the wait for helpers goes by it too.
CUNORM_CPU_RUNTIME long long now() {
    timespec time;
    timespec_get(&time, TIME_UTC);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

// How the interpreter's main thread sees signals while a launch runs: it alone runs their handlers.
struct Watch {
    const Interpreter* interpreter;
    Launch* launch;
    void* state;         // of the interpreter's thread, while it has let go
    long long next;      // look
    int process;
    bool helped;         // other operating-system threads run the launch too
};

// Also where somebody has set the clock back.
CUNORM_CPU_RUNTIME bool due(const Watch* watch) {
    return watch != nullptr && uint64_t(watch->next - now()) > uint64_t(look_nanoseconds);
}

// Runs the handlers of the signals that came. False if the launch must stop.
CUNORM_CPU_RUNTIME bool look(Watch* watch, unsigned& status) {
    const Interpreter& interpreter = *watch->interpreter;
    interpreter.take(watch->state);
    const bool raised = interpreter.check_signals() != 0;
    watch->state = interpreter.let_go();
    watch->next = now() + look_nanoseconds;
    if (watch->helped && getpid() != watch->process) {
        status = forked;  // a handler forked. This is the child: it has none of the helpers, and must not wait for them
    } else if (raised) {
        status = stopped;
    } else {
        return true;
    }
    __atomic_store_n(&watch->launch->stop, 1, __ATOMIC_RELAXED);
    return false;
}

// The threads of a launch beside the calling one. It lies on the heap, where a late one finds it after the launch.
struct Helpers {
    const Task* task;
    const Scratch* scratches;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int started;   // helpers that the system has made
    int begun;     // helpers that have taken their scratch
    int running;   // helpers at work
    int users;     // threads that will look at this once more
    bool over;     // nobody begins any more
    unsigned status;
};

CUNORM_CPU_RUNTIME void leave(Helpers* all) {  // under the lock
    const bool last = --all->users == 0;
    pthread_mutex_unlock(&all->lock);
    if (last) {
        free(all);
    }
}

// A helper touches the launch only between its beginning and its end, for which the calling thread waits.
CUNORM_CPU_RUNTIME void* help(void* given) {
    Helpers* const all = static_cast<Helpers*>(given);
    pthread_mutex_lock(&all->lock);
    if (!all->over) {
        const Scratch& scratch = all->scratches[all->begun++];
        ++all->running;
        pthread_mutex_unlock(&all->lock);
        const unsigned status = work(*all->task, scratch, nullptr);
        pthread_mutex_lock(&all->lock);
        all->status = status == faulted ? faulted : all->status;
        --all->running;
        pthread_cond_signal(&all->ended);
    }
    leave(all);
    return nullptr;
}

// Starts as many of the wanted threads as the system allows; null if that is none.
CUNORM_CPU_RUNTIME Helpers* start_helpers(const Task& task, const Scratch* scratches, int wanted) {
    Helpers* const all = static_cast<Helpers*>(calloc(1, sizeof(Helpers)));
    if (all == nullptr) {
        task.launch->missing = wanted;
        __atomic_fetch_sub(&task.launch->workers, wanted, __ATOMIC_SEQ_CST);
        return nullptr;
    }
    *all = {&task, scratches, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, 1, false, done};
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, thread_stack_bytes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_mutex_lock(&all->lock);
    for (pthread_t thread; all->started < wanted && pthread_create(&thread, &attributes, help, all) == 0;) {
        ++all->started;
        ++all->users;
    }
    const int started = all->started;
    pthread_mutex_unlock(&all->lock);
    pthread_attr_destroy(&attributes);
    task.launch->missing = wanted - started;
    __atomic_fetch_sub(&task.launch->workers, wanted - started, __ATOMIC_SEQ_CST);
    if (started == 0) {
        free(all);
        return nullptr;
    }
    return all;
}

// Waits until no helper is at work, looking at signals; helpers end soon once one has told the launch to stop.
CUNORM_CPU_RUNTIME unsigned await_helpers(Helpers* all, Watch* watch, unsigned status) {
    pthread_mutex_lock(&all->lock);
    all->over = true;
    // Those that never begin cannot free a polling helper: it waits for the others only, and ends by itself in a deadlock.
    __atomic_fetch_sub(&all->task->launch->workers, all->started - all->begun, __ATOMIC_SEQ_CST);
    while (all->running != 0) {
        const long long then = now() + look_nanoseconds;
        const timespec until = {time_t(then / 1000000000), long(then % 1000000000)};
        pthread_cond_timedwait(&all->ended, &all->lock, &until);
        if (status == done && due(watch)) {
            pthread_mutex_unlock(&all->lock);
            if (!look(watch, status) && status == forked) {
                return status;
            }
            pthread_mutex_lock(&all->lock);
        }
    }
    status = all->status == faulted ? faulted : status;
    leave(all);
    return status;
}

// Runs a launch on several threads, this one among them, and returns when none of them runs.
CUNORM_CPU_RUNTIME unsigned share(const Task& task, const Scratch* scratches, int count, Watch* watch) {
    Helpers* const helpers = start_helpers(task, scratches + 1, count - 1);
    if (watch != nullptr) {
        watch->helped = helpers != nullptr;
    }
    const unsigned status = work(task, scratches[0], watch);
    return helpers == nullptr || status == forked ? status : await_helpers(helpers, watch, status);
}

// What the interpreter calls, and what it sees the end of all threads by.
CUNORM_CPU_RUNTIME int run(const Task& task, const Scratch* scratches, int count, const Interpreter& interpreter,
                           bool watched) {
    Watch watch = {&interpreter, task.launch, interpreter.let_go(), now() + look_nanoseconds, getpid(), false};
    Watch* const seen = watched ? &watch : nullptr;
    const unsigned status = count > 1 ? share(task, scratches, count, seen) : work(task, scratches[0], seen);
    interpreter.take(watch.state);
    return int(status);
}

}  // namespace cunorm_cpu
