// Who knows what of whom: the order that barriers and their like give to the threads of a cluster. Checked build only.
//
// A clock ticks at every such event, for the whole worker. A thread knows what another one did before some tick: by a
// barrier of the block or the cluster, or by a row of its own, which __syncwarp and mbarriers write. Rows exist only
// where those are used.

#ifdef CUNORM_CPU_CHECKED
namespace cunorm_cpu {

constexpr unsigned largest_cluster = 16;

struct Clocks {
    unsigned threads, all;                 // of a block, of the cluster
    uint32_t base;                         // everybody knows everything before
    uint32_t block_base[largest_cluster];  // everybody in the block knows everything in the block before
    uint32_t* block_row[largest_cluster];  // what everybody in the block knows of each thread of the cluster
    uint32_t** row;                        // what a thread knows besides
    bool* grown;                           // its row has, since the block's last barrier
    uint32_t* fenced;                      // the tick of a thread's last fence towards asynchronous copies
    bool rows;                             // whether there are any
    uint32_t* arrival[3];                  // when each thread arrived at the cluster's barrier, the passages in turn
    uint32_t* passed;                      // how many such barriers a thread has behind it
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

// The tick before which `id` knows everything that `other` did.
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

// A release into something that others will look at: it knows all that the thread knows, and what the thread did.
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

// Every thread of the block stands at its barrier.
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

// The lanes of the mask stand at a __syncwarp; `first` is the warp's lane 0.
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
    clocks.arrival[generation % 3][id] = ++tick;  // two would be one too few: a slow thread is a passage behind
}

CUNORM_CPU_RUNTIME void cluster_passage(Clocks& clocks, unsigned id, unsigned generation) {
    clocks.passed[id] = generation + 1;
}

}  // namespace cunorm_cpu
#endif
