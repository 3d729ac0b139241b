// Vector clocks: the happens-before order that barriers and similar operations create in a cluster. Checked build only.
//
// Each worker has one clock, which ticks at every such event. For two threads A and B the clocks record the tick before
// which all actions of B happen before A's next action: A "knows" them. The tick results from a barrier of the block or
// of the cluster, or from A's row, which __syncwarp and mbarriers update. Rows are allocated only if a kernel uses
// those.

#ifdef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

constexpr unsigned largest_cluster = 16;

struct Clocks {
    unsigned threads, all;                 // threads of a block, threads of the cluster
    uint32_t base;                         // every thread knows every action before this tick
    uint32_t block_base[largest_cluster];  // every thread of the block knows the block's actions before this tick
    uint32_t* block_row[largest_cluster];  // ticks that the whole block knows, one per thread of the cluster
    uint32_t** row;                        // per thread: additional ticks that it knows, one per thread of the cluster
    bool* grown;                           // whether the thread's row has changed since the block's last barrier
    uint32_t* fenced;                      // tick of each thread's last fence_async
    bool rows;                             // whether any row is allocated
    uint32_t* arrival[3];                  // per thread, arrival at the cluster's barrier; three generations in turn
    uint32_t* passed;                      // number of cluster barriers that each thread has passed
};

CUNORM_CPU_RUNTIME Clocks* new_clocks(unsigned threads, unsigned blocks, uint32_t now) {
    Clocks* clocks = static_cast<Clocks*>(calloc(1, sizeof(Clocks)));
    clocks->threads = threads;
    clocks->all = threads * blocks;
    clocks->base = now;
    clocks->row = static_cast<uint32_t**>(calloc(clocks->all, sizeof(uint32_t*)));
    clocks->grown = static_cast<bool*>(calloc(clocks->all, sizeof(bool)));
    clocks->fenced = static_cast<uint32_t*>(calloc(clocks->all, sizeof(uint32_t)));
    return clocks;
}

CUNORM_CPU_RUNTIME void free_clocks(Clocks* clocks) {
    for (unsigned i = 0; i < clocks->all && clocks->rows; ++i) {
        free(clocks->row[i]);
    }
    for (unsigned i = 0; i < largest_cluster; ++i) {
        free(clocks->block_row[i]);
    }
    free(clocks->row);
    free(clocks->grown);
    free(clocks->fenced);
    for (uint32_t* arrival : clocks->arrival) {
        free(arrival);
    }
    free(clocks->passed);
    free(clocks);
}

// The tick before which `id` knows all actions of `other`.
CUNORM_CPU_RUNTIME uint32_t knows(const Clocks& clocks, unsigned id, unsigned other) {
    uint32_t tick = clocks.base;
    const unsigned block = id / clocks.threads;
    if (other / clocks.threads == block && clocks.block_base[block] > tick) {
        tick = clocks.block_base[block];
    }
    if (clocks.passed != nullptr && clocks.passed[id] != 0) {
        const uint32_t arrived = clocks.arrival[(clocks.passed[id] - 1) % 3][other];
        tick = arrived > tick ? arrived : tick;
    }
    if (clocks.rows) {
        if (clocks.block_row[block] != nullptr && clocks.block_row[block][other] > tick) {
            tick = clocks.block_row[block][other];
        }
        if (clocks.row[id] != nullptr && clocks.row[id][other] > tick) {
            tick = clocks.row[id][other];
        }
    }
    return tick;
}

CUNORM_CPU_RUNTIME uint32_t* row_of(Clocks& clocks, uint32_t*& row) {
    if (row == nullptr) {
        row = static_cast<uint32_t*>(calloc(clocks.all, sizeof(uint32_t)));
        clocks.rows = true;
    }
    return row;
}

CUNORM_CPU_RUNTIME void raise_to(uint32_t* row, const uint32_t* other, unsigned count) {
    for (unsigned i = 0; i < count; ++i) {
        row[i] = row[i] > other[i] ? row[i] : other[i];
    }
}

// A release into a row that other threads will acquire: the row receives everything that the thread knows, and the
// thread's own actions.
CUNORM_CPU_RUNTIME void release(Clocks& clocks, unsigned id, uint32_t*& into, uint32_t& tick) {
    uint32_t* row = row_of(clocks, into);
    for (unsigned i = 0; i < clocks.all; ++i) {
        const uint32_t known = knows(clocks, id, i);
        row[i] = row[i] > known ? row[i] : known;
    }
    row[id] = ++tick;
}

CUNORM_CPU_RUNTIME void acquire(Clocks& clocks, unsigned id, const uint32_t* from) {
    if (from != nullptr) {
        raise_to(row_of(clocks, clocks.row[id]), from, clocks.all);
        clocks.grown[id] = true;
    }
}

// Called when all threads of the block have arrived at its barrier.
CUNORM_CPU_RUNTIME void block_release(Clocks& clocks, unsigned block, uint32_t& tick) {
    if (clocks.rows) {
        for (unsigned id = block * clocks.threads; id < (block + 1) * clocks.threads; ++id) {
            if (clocks.grown[id]) {
                raise_to(row_of(clocks, clocks.block_row[block]), clocks.row[id], clocks.all);
                clocks.grown[id] = false;
            }
        }
    }
    clocks.block_base[block] = ++tick;
}

// Called when all lanes of the mask have arrived at a __syncwarp. `first` is the id of the warp's lane 0.
CUNORM_CPU_RUNTIME void lanes_release(Clocks& clocks, unsigned first, unsigned mask, uint32_t& tick) {
    const uint32_t now = ++tick;
    uint32_t* together = static_cast<uint32_t*>(calloc(clocks.all, sizeof(uint32_t)));
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        const unsigned id = first + unsigned(__builtin_ctz(rest));
        if (clocks.row[id] != nullptr) {
            raise_to(together, clocks.row[id], clocks.all);
        }
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        together[first + unsigned(__builtin_ctz(rest))] = now;
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        acquire(clocks, first + unsigned(__builtin_ctz(rest)), together);
    }
    free(together);
}

CUNORM_CPU_RUNTIME void cluster_arrival(Clocks& clocks, unsigned id, unsigned generation, uint32_t& tick) {
    if (clocks.passed == nullptr) {
        for (uint32_t*& arrival : clocks.arrival) {
            arrival = static_cast<uint32_t*>(calloc(clocks.all, sizeof(uint32_t)));
        }
        clocks.passed = static_cast<uint32_t*>(calloc(clocks.all, sizeof(uint32_t)));
    }
    clocks.arrival[generation % 3][id] = ++tick;  // two rows are too few: a slow thread may be one generation behind
}

CUNORM_CPU_RUNTIME void cluster_passage(Clocks& clocks, unsigned id, unsigned generation) {
    clocks.passed[id] = generation + 1;
}

}  // namespace cunorm_cpu
#endif
