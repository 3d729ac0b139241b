// GroupNorm backward over the part of the tensors that a sweep covers: the sums of its channels, and its dx. Strategy
// `split` has one kernel for each of the two, strategy `grid` one kernel for both.
#include "common/activation.cuh"
#include "common/parameters.cuh"
#include "partition/sweep.cuh"

// Resident threads per multiprocessor that the launch bound requires. With an activation, a thread that recomputes z
// for eight channels needs more registers, so the bound is lower.
constexpr int gradient_threads = is_identity || sweep_t::slots < 8 ? 512 : 384;

// Arrays of a launch, and how the tensors are cut into chunks.
struct GroupGradients {
    const data_t* dy;
    const data_t* x;
    const stat_t* mean;
    const stat_t* rstd;
    const gamma_t* gamma;
    const beta_t* beta;
    Chunking cut;
    long long groups;

    __device__ __forceinline__ long long group_channels() const { return cut.C / groups; }

    // What thread_sums and coefficients have to know of a thread's channels, loaded where it is used.
    __device__ __forceinline__ Statistics statistics(long long n, long long group, bool with_rstd) const {
        const long long at = n * groups + group;
        return Statistics{widen(load(mean, at)), with_rstd ? acc_t(widen(load(rstd, at))) : acc_t(0)};
    }
    __device__ __forceinline__ acc_t rstd_of(long long n, long long group) const {
        return acc_t(widen(load(rstd, n * groups + group)));
    }
    __device__ __forceinline__ acc_t scale(int, long long channel) const { return parameter(gamma, channel, acc_t(1)); }
    __device__ __forceinline__ Affine affine(int, long long channel, Statistics found) const {
        return affine_of(gamma, beta, channel, found.mean, found.rstd);
    }

    // Adds up g and g * xhat over a thread's packs, where g is the gradient with respect to the activation's input.
    template <typename Path, typename Known>
    __device__ __forceinline__ void thread_sums(const Path& sweep, const Known& known,
                                                Pair (&found)[sweep_t::slots]) const {
        acc_t mean_of[sweep_t::slots] = {};
        ActivationGrad activation_grad[sweep_t::slots] = {};
        const auto of_group = [&](long long group) { return known.statistics(sweep.n, group, !is_identity); };
        each_slot(sweep, group_channels(), of_group, [&](int slot, long long channel, Statistics of) {
            mean_of[slot] = of.mean;
            if (!is_identity) {
                activation_grad[slot] = ActivationGrad{known.affine(slot, channel, of)};
            }
        });
        sweep_gradient_sums(sweep, dy, x, mean_of, activation_grad, found);
        const auto rstd_found = [&](long long group) { return known.rstd_of(sweep.n, group); };
        each_slot(sweep, group_channels(), rstd_found,
                  [&](int slot, long long, acc_t of) { found[slot].second *= of; });
    }

    // Stores sum g and sum g * xhat of the sweep's channels to a workspace [N * chunks, C], at the row of the sweep's
    // chunk. `partials` is shared: pack_size pairs per thread if a thread has several channels. The whole block calls.
    __device__ __forceinline__ void sums(const sweep_t& sweep, Pair* partials, Pair* workspace) const {
        Pair found[sweep_t::slots] = {};
        thread_sums(sweep, *this, found);
        gather_sums(sweep, partials, found, [&](long long channel, Pair whole) {
            store(workspace, cut.part(sweep.n, sweep.chunk, channel), whole);
        });
    }

    // Workspace index of A / L and B / L of a group. They replace the group's first part after that part has been read.
    __device__ __forceinline__ long long means_of(long long n, long long group) const {
        return cut.part(n, 0, group * group_channels());
    }

    // Sets the coefficients of dx of a thread's channels, from means_of(group): A / L and B / L of a group.
    template <typename Known, typename Means>
    __device__ __forceinline__ void coefficients(const sweep_t& sweep, const Known& known, Means means_of,
                                                 LinearGradient (&of)[sweep_t::slots],
                                                 ActivationGrad (&activation_grad)[sweep_t::slots]) const {
        const auto of_group = [&](long long group) {
            const Statistics found = known.statistics(sweep.n, group, true);
            const Pair means = means_of(group);
            return Coefficients{acc_t(1), found.mean, found.rstd, means.first, means.second};
        };
        each_slot(sweep, group_channels(), of_group, [&](int slot, long long channel, Coefficients found) {
            found.gamma = known.scale(slot, channel);
            of[slot] = linear_gradient(found);
            if (!is_identity) {
                activation_grad[slot] = ActivationGrad{known.affine(slot, channel, Statistics{found.mean, found.rstd})};
            }
        });
    }

    // Writes dx of the sweep's elements.
    __device__ __forceinline__ void input(const sweep_t& sweep, const Pair* workspace, data_t* dx) const {
        LinearGradient of[sweep_t::slots] = {};
        ActivationGrad activation_grad[sweep_t::slots] = {};
        coefficients(
            sweep, *this, [&](long long group) { return load(workspace, means_of(sweep.n, group)); }, of,
            activation_grad);
        const data_t* const from[2] = {dy, x};
        sweep_write(sweep, from, dx, [&](int slot, const acc_t(&v)[2]) {
            return input_gradient(activation_grad[slot](v[0], v[1]), v[1], of[slot]);
        });
    }
};
