// Optional parameters, and the gradients of the parameters per channel.
#include "common/norm.cuh"

// array[index], or `absent` if the array is null or `there` is false (no such index). It is one condition, so that the
// load is predicated: a branch around the load would delay the next load.
template <typename T>
__device__ __forceinline__ acc_t parameter(const T* array, long long index, acc_t absent, bool there = true) {
    return there && array != nullptr ? acc_t(widen(load(array, index))) : absent;
}

// The array from an index on, or null.
template <typename T>
__device__ __forceinline__ const T* from_index(const T* array, long long index) {
    return array == nullptr ? nullptr : array + index;
}

// The transform from x to y for a channel with these statistics.
template <typename G, typename B>
__device__ __forceinline__ Affine affine_of(const G* gamma, const B* beta, long long channel, acc_t mean, acc_t rstd,
                                            bool there = true) {
    return Affine{mean, rstd * parameter(gamma, channel, acc_t(1), there), parameter(beta, channel, acc_t(0), there)};
}

// The parameters of a pack's elements. They stay in registers in their storage type, at their own width: several packs
// of a wider type than x, or a part of a pack of a narrower one.
template <typename T>
struct ParameterPack {
    static constexpr int size = Pack<T>::size < pack_size ? Pack<T>::size : pack_size;
    Pack<T, size> part[pack_size / size];

    // Loads the elements [first, first + pack_size) of array[0, length), or `absent` if the array is null. Elements
    // outside [0, length) read as zero. Each part is one access if the address is a multiple of its bytes.
    __device__ __forceinline__ void load_from(const T* array, int first, int length, acc_t absent) {
#pragma unroll
        for (int at = 0; at < pack_size; at += size) {
            Pack<T, size>& here = part[at / size];
            if (array != nullptr) {
                here = load_pack<size>(array, 0, first + at, length);
                continue;
            }
#pragma unroll
            for (int i = 0; i < size; ++i) {
                here.set(i, narrow<T>(absent));
            }
        }
    }
    // Same as above, from packs in shared memory.
    __device__ __forceinline__ void load_from(const Pack<T>* whole_packs, int first, int length) {
        const auto* const packs = reinterpret_cast<const Pack<T, size>*>(whole_packs);
#pragma unroll
        for (int at = 0; at < pack_size; at += size) {
            Pack<T, size>& here = part[at / size];
            const int from = first + at;
            if (from >= 0 && from < length && from % size == 0) {
                here = packs[from / size];
                continue;
            }
#pragma unroll
            for (int i = 0; i < size; ++i) {
                const int column = from + i;
                const bool there = column >= 0 && column < length;
                here.set(i, there ? packs[column / size].get(column % size) : narrow<T>(acc_t(0)));
            }
        }
    }
    __device__ __forceinline__ acc_t of(int i) const { return widen(part[i / size].get(i % size)); }
};

// See ParameterPack::load_from.
template <typename T>
__device__ __forceinline__ ParameterPack<T> parameters_of(const T* array, int first, int length, acc_t absent) {
    ParameterPack<T> found;
    found.load_from(array, first, length, absent);
    return found;
}

// The destination of dbeta (first) and dgamma (second) of a channel: a row of the workspace [rows, C], which a second
// kernel sums, or the results themselves if there is only one row (`workspace` is null).
struct ParameterGradients {
    Pair* workspace;
    gamma_t* dgamma;
    gamma_t* dbeta;
    long long C;

    __device__ __forceinline__ bool wanted() const {
        return workspace != nullptr || dgamma != nullptr || dbeta != nullptr;
    }
    __device__ __forceinline__ void store_channel(long long row, long long channel, Pair sums) const {
        if (workspace != nullptr) {
            store(workspace, row * C + channel, sums);
            return;
        }
        if (dbeta != nullptr) {
            store(dbeta, channel, narrow<gamma_t>(sums.first));
        }
        if (dgamma != nullptr) {
            store(dgamma, channel, narrow<gamma_t>(sums.second));
        }
    }
};
