// Runs blocks for their results and their counts, without a clock.

// Instructions that a warp executes before another warp of its block has its turn.
constexpr int TURN = 512;
// Rounds over all warps in which nothing changes, after which the kernel hangs. A wait that is in vain once is in vain
// again unless memory or a barrier changes in between.
constexpr int VAIN_ROUNDS = 64;

struct Runner {
    const Job& job;
    Machine machine;
    std::vector<std::unique_ptr<Cluster>> alive;
    bool changed = false;

    explicit Runner(const Job& given) : job(given), machine(given) {}

    void run() {
        int next = job.first, vain = 0;
        const int end = job.first + job.blocks;
        while (true) {
            while (next < end && static_cast<int>(alive.size()) < job.resident) {
                alive.push_back(machine.make(next));
                next += job.cluster;
            }
            if (alive.empty()) return;
            changed = false;
            for (auto& cluster : alive) {
                for (auto& block : cluster->blocks) {
                    for (auto& warp : block->warps) turn(*warp);
                }
            }
            vain = changed ? 0 : vain + 1;
            if (vain == VAIN_ROUNDS) hang();
            std::erase_if(alive, [](const auto& cluster) { return over(*cluster); });
        }
    }

    void turn(Warp& warp) {
        for (int k = 0; k < TURN && warp.state == State::running; ++k) {
            const Event event = machine.step(warp);
            changed = changed || event.changed;
            if (event.code == nullptr || event.polled) return;
            if (k == TURN - 1) changed = true;  // it computes
        }
    }

    static bool over(const Cluster& cluster) {
        for (const auto& block : cluster.blocks) {
            if (block->running != 0) return false;
        }
        return true;
    }

    // Reports the first warp that waits.
    [[noreturn]] void hang() const {
        for (const auto& cluster : alive) {
            for (const auto& block : cluster->blocks) {
                for (const auto& warp : block->warps) {
                    if (warp->state != State::done) report(*warp);
                }
            }
        }
        fail("hangs");
    }
    [[noreturn]] static void report(const Warp& warp) {
        const char* what = warp.state == State::at_block_barrier     ? "waits at a barrier of the block"
                           : warp.state == State::at_cluster_barrier ? "waits at the barrier of the cluster"
                           : warp.waits()                            ? "waits for other lanes of the warp"
                                                                     : "polls a word or an mbarrier";
        Fault fault{std::string(what) + ", in vain"};
        fault.pc = warp.groups.empty() ? -1 : warp.groups.front().pc;
        fault.block = warp.block->number;
        fault.warp = warp.number;
        throw fault;
    }
};

// Runs `what`; a fault becomes text in the job. Returns whether there was one.
template <typename What>
static int guarded_call(Job* job, What what) {
    try {
        what();
        return 0;
    } catch (const Fault& fault) {
        snprintf(static_cast<char*>(job->message), static_cast<size_t>(job->message_bytes), "%s", fault.text.c_str());
        job->fault[0] = fault.pc;
        job->fault[1] = fault.block;
        job->fault[2] = fault.warp;
        return 1;
    }
}

extern "C" __attribute__((visibility("default"))) int simulator_run(Job* job) {
    return guarded_call(job, [&] { Runner(*job).run(); });
}
