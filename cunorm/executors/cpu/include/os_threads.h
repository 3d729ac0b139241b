// The CPU executor's operating-system threads. They exist only inside one call from the interpreter. When that call has
// returned, no thread of the launch runs any more, even if a signal handler raised an exception. The helpers (all
// threads but the calling one) never use the interpreter.

namespace cunorm_cpu {

constexpr long long look_nanoseconds = 50000000;  // interval between two checks for signals
constexpr size_t thread_stack_bytes = 1 << 20;    // kernels run on the fibers' stacks

// The only clock of standard C. pthread_cond_timedwait() in await_helpers() uses the same clock.
CUNORM_CPU_RUNTIME long long now() {
    timespec time;
    timespec_get(&time, TIME_UTC);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

// State for the checks for signals while a launch runs. Only the interpreter's main thread runs signal handlers.
struct Watch {
    const Interpreter* interpreter;
    Launch* launch;
    void* state;         // thread state of the interpreter while the GIL is released
    long long next;      // time of the next check
    int process;         // process that launched
    bool helped;         // whether other operating-system threads run the launch too
};

// Whether a check for signals is due; also true if the clock was set back.
CUNORM_CPU_RUNTIME bool due(const Watch* watch) {
    return watch != nullptr && uint64_t(watch->next - now()) > uint64_t(look_nanoseconds);
}

// Runs the handlers of pending signals. Returns false if the launch must stop.
CUNORM_CPU_RUNTIME bool look(Watch* watch, unsigned& status) {
    const Interpreter& interpreter = *watch->interpreter;
    interpreter.take(watch->state);
    const bool raised = interpreter.check_signals() != 0;
    watch->state = interpreter.let_go();
    watch->next = now() + look_nanoseconds;
    if (watch->helped && getpid() != watch->process) {
        status = forked;  // a handler forked; this is the child, which has no helpers and must not wait for them
    } else if (raised) {
        status = stopped;
    } else {
        return true;
    }
    __atomic_store_n(&watch->launch->stop, 1, __ATOMIC_RELAXED);
    return false;
}

// State of the helpers of a launch. It is on the heap, because a helper that starts late reads it after the launch.
struct Helpers {
    const Task* task;
    const Scratch* scratches;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int started;   // helpers that the system has started
    int begun;     // helpers that have taken a scratch
    int running;   // helpers that run blocks
    int users;     // threads that will still access this struct
    bool over;     // whether helpers that start from now on must not begin
    unsigned status;
};

CUNORM_CPU_RUNTIME void leave(Helpers* all) {  // the caller holds the lock
    const bool last = --all->users == 0;
    pthread_mutex_unlock(&all->lock);
    if (last) {
        free(all);
    }
}

// A helper accesses the launch only while it is counted in `running`. The calling thread waits until that is zero.
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

// Starts as many of the wanted threads as the system allows. Returns null if it starts none.
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

// Waits until no helper runs blocks, and checks for signals meanwhile. After a handler has raised, the launch's `stop`
// makes the helpers end soon.
CUNORM_CPU_RUNTIME unsigned await_helpers(Helpers* all, Watch* watch, unsigned status) {
    pthread_mutex_lock(&all->lock);
    all->over = true;
    // Helpers that never begin run no blocks. They must not count as workers, so that a polling helper detects a
    // deadlock.
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

// Runs a launch on several threads, including this one, and returns when none of them runs blocks any more.
CUNORM_CPU_RUNTIME unsigned share(const Task& task, const Scratch* scratches, int count, Watch* watch) {
    Helpers* const helpers = start_helpers(task, scratches + 1, count - 1);
    if (watch != nullptr) {
        watch->helped = helpers != nullptr;
    }
    const unsigned status = work(task, scratches[0], watch);
    return helpers == nullptr || status == forked ? status : await_helpers(helpers, watch, status);
}

// Entry point for the interpreter. When it returns, no thread of the launch runs blocks any more.
CUNORM_CPU_RUNTIME CUNORM_CPU_CALLED int run(const Task& task, const Scratch* scratches, int count,
                                             const Interpreter& interpreter, bool watched) {
    Watch watch = {&interpreter, task.launch, interpreter.let_go(), now() + look_nanoseconds, getpid(), false};
    Watch* const seen = watched ? &watch : nullptr;
    const unsigned status = count > 1 ? share(task, scratches, count, seen) : work(task, scratches[0], seen);
    interpreter.take(watch.state);
    return int(status);
}

}  // namespace cunorm_cpu
