// Storage types, their conversions, 16-byte packs, and the functions that access global and shared memory.
//
// The host writes above this file: the typedefs data_t (x, dy, dx), y_t (y: data_t, or float for 16-bit data),
// parameter types (gamma, beta and their gradients), stat_t (mean, rstd), layout_t, activation_t and text_t (Generic or
// Specialised), and `struct Tile` with the compile-time constants. No CUDA header is included: each of the 16-bit
// conversions is one instruction, and headers would take longer to compile than the kernels.
//
// Every access to global memory goes through a function of this file or of async.cuh. On the CPU these functions report
// each access to the executor, which checks it. A raw dereference would escape the check, and a test forbids it.

struct float16 {
    unsigned short bits;
};

struct bfloat16 {
    unsigned short bits;
};

// The type in which the values of a storage type are summed.
template <typename T>
struct Accumulator {
    typedef float type;
};
template <>
struct Accumulator<double> {
    typedef double type;
};
typedef Accumulator<data_t>::type acc_t;

#ifdef CUNORM_CPU

__device__ __forceinline__ float bits_to_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

__device__ __forceinline__ unsigned float_to_bits(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Shifting the 15 magnitude bits into place leaves the exponent 112 too small. One exact multiplication corrects it,
// and also makes subnormals normal. Infinity and NaN have the largest exponent before and after.
__device__ __forceinline__ float half_to_float(unsigned short half) {
    const unsigned magnitude = half & 0x7fffu;
    const unsigned sign = (half & 0x8000u) << 16;
    const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;
    const unsigned wide = magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : float_to_bits(scaled);
    return bits_to_float(wide | sign);
}

// Rounds to nearest even. Below the smallest normal half (2^-14), adding 0.5 makes the float adder round at the right
// bit.
__device__ __forceinline__ unsigned short float_to_half(float value) {
    const unsigned all = float_to_bits(value);
    const unsigned magnitude = all & 0x7fffffffu;
    const unsigned sign = (all >> 16) & 0x8000u;
    unsigned half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;  // NaN
    } else if (magnitude >= 0x477ff000u) {
        half = 0x7c00u;  // 65520 and more round to infinity
    } else if (magnitude < 0x38800000u) {
        half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return static_cast<unsigned short>(half | sign);
}

__device__ __forceinline__ unsigned short float_to_bfloat(float value) {
    const unsigned all = float_to_bits(value);
    if ((all & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fffu;  // the NaN that the PTX instruction returns
    }
    return static_cast<unsigned short>((all + 0x7fffu + ((all >> 16) & 1u)) >> 16);
}

#else

__device__ __forceinline__ float bits_to_float(unsigned bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float half_to_float(unsigned short half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

__device__ __forceinline__ unsigned short float_to_bfloat(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif

__device__ __forceinline__ float widen(float16 value) { return half_to_float(value.bits); }
__device__ __forceinline__ float widen(bfloat16 value) {
    return bits_to_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }

// a * b + c with one rounding. The kernels are compiled without contraction (--fmad=false): which products are fused
// follows from the text alone. So the generic and the specialised text of a kernel give the same bits.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// The only rounding: to nearest even, from the accumulator type to a storage type.
template <typename T>
__device__ __forceinline__ T narrow(acc_t value);
template <>
__device__ __forceinline__ float16 narrow<float16>(acc_t value) {
    return float16{float_to_half(static_cast<float>(value))};
}
template <>
__device__ __forceinline__ bfloat16 narrow<bfloat16>(acc_t value) {
    return bfloat16{float_to_bfloat(static_cast<float>(value))};
}
template <>
__device__ __forceinline__ float narrow<float>(acc_t value) {
    return static_cast<float>(value);
}
template <>
__device__ __forceinline__ double narrow<double>(acc_t value) {
    return static_cast<double>(value);
}

constexpr int access_bytes = 16;  // the widest load or store on every architecture of the compile gate

// Consecutive elements, 16 bytes unless `count` is less, stored as words. A compiler that sees 16-bit elements splits
// them where they are loaded. It then waits for every load before the next one, and holds each element in a register of
// its own.
template <typename T, int count = access_bytes / sizeof(T)>
struct alignas(count * sizeof(T)) Pack {
    static constexpr int size = count, words = count * sizeof(T) / sizeof(unsigned);
    union {
        T items[size];  // so that a pack may alias elements of an array
        unsigned word[words];
    };

    __device__ __forceinline__ T get(int i) const {
        T item;
        if constexpr (sizeof(T) < sizeof(unsigned)) {
            const unsigned short half = static_cast<unsigned short>(word[i / 2] >> i % 2 * 16);
            memcpy(&item, &half, sizeof item);
        } else {
            memcpy(&item, word + i * (sizeof(T) / sizeof(unsigned)), sizeof item);
        }
        return item;
    }
    __device__ __forceinline__ void set(int i, T item) {
        if constexpr (sizeof(T) < sizeof(unsigned)) {
            unsigned short half;
            memcpy(&half, &item, sizeof half);
            const unsigned others = word[i / 2] & (i % 2 == 0 ? 0xffff0000u : 0xffffu);
            word[i / 2] = others | static_cast<unsigned>(half) << i % 2 * 16;
        } else {
            memcpy(word + i * (sizeof(T) / sizeof(unsigned)), &item, sizeof item);
        }
    }
    // Moves each element to the place before its own, and the first to the last place.
    __device__ __forceinline__ void rotate() {
        const unsigned first[2] = {word[0], word[1]};
        if constexpr (sizeof(T) < sizeof(unsigned)) {
#pragma unroll
            for (int w = 0; w < words; ++w) {
                word[w] = word[w] >> 16 | (w + 1 < words ? word[w + 1] : first[0]) << 16;
            }
        } else {
            constexpr int by = sizeof(T) / sizeof(unsigned);
#pragma unroll
            for (int w = 0; w < words; ++w) {
                word[w] = w + by < words ? word[w + by] : first[w + by - words];
            }
        }
    }
};

// A pack whose elements are widened only if a condition holds. The compiler moves no asm out of a condition: if the asm
// that widens a float16 were in one, every element would have a branch, and the results would occupy registers until
// the branches join. So float16 is widened here.
template <typename T, int count>
__device__ __forceinline__ const Pack<T, count>& selectable(const Pack<T, count>& pack) {
    return pack;
}
template <int count>
__device__ __forceinline__ Pack<float, count> selectable(const Pack<float16, count>& pack) {
    Pack<float, count> wide;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        wide.set(i, widen(pack.get(i)));
    }
    return wide;
}

constexpr int pack_size = Pack<data_t>::size;

// Two values of a 16-bit type in one word, each rounded as narrow() rounds it. The GPU has one instruction for both.
template <typename T>
__device__ __forceinline__ unsigned narrow_two(float lower, float upper);
#ifdef CUNORM_CPU
template <>
__device__ __forceinline__ unsigned narrow_two<float16>(float lower, float upper) {
    return float_to_half(lower) | static_cast<unsigned>(float_to_half(upper)) << 16;
}
template <>
__device__ __forceinline__ unsigned narrow_two<bfloat16>(float lower, float upper) {
    return float_to_bfloat(lower) | static_cast<unsigned>(float_to_bfloat(upper)) << 16;
}
#else
template <>
__device__ __forceinline__ unsigned narrow_two<float16>(float lower, float upper) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
    return word;
}
template <>
__device__ __forceinline__ unsigned narrow_two<bfloat16>(float lower, float upper) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
    return word;
}
#endif

// A pack of values, each rounded as narrow() rounds it.
template <typename T>
__device__ __forceinline__ Pack<T> narrow_pack(const acc_t (&values)[Pack<T>::size]) {
    Pack<T> pack;
    if constexpr (sizeof(T) < sizeof(unsigned)) {
#pragma unroll
        for (int w = 0; w < Pack<T>::words; ++w) {
            pack.word[w] = narrow_two<T>(static_cast<float>(values[2 * w]), static_cast<float>(values[2 * w + 1]));
        }
    } else {
#pragma unroll
        for (int i = 0; i < Pack<T>::size; ++i) {
            pack.set(i, narrow<T>(values[i]));
        }
    }
    return pack;
}

// Two packs of a type twice as wide as data_t, for the elements of one pack of data_t. The functions on packs that
// outputs need take them too.
template <typename T>
struct TwoPacks {
    static constexpr int size = Pack<T>::size;
    Pack<T> half[2];

    __device__ __forceinline__ void set(int i, T item) { half[i / size].set(i % size, item); }
    // See Pack::rotate.
    __device__ __forceinline__ void rotate() {
        const T first = half[0].get(0), middle = half[1].get(0);
        half[0].rotate();
        half[1].rotate();
        half[0].set(size - 1, middle);
        half[1].set(size - 1, first);
    }
};

template <typename T, bool wide>
struct OutputType {
    typedef Pack<T> type;
};
template <typename T>
struct OutputType<T, true> {
    typedef TwoPacks<T> type;
};
// The outputs of type T for the elements of a pack of data_t. y may be wider than x.
template <typename T>
constexpr bool is_wide = (sizeof(T) > sizeof(data_t));
template <typename T>
using Outputs = typename OutputType<T, is_wide<T>>::type;

template <typename T>
__device__ __forceinline__ TwoPacks<T> narrow_pack(const acc_t (&values)[2 * Pack<T>::size]) {
    TwoPacks<T> packs;
#pragma unroll
    for (int i = 0; i < 2 * packs.size; ++i) {
        packs.set(i, narrow<T>(values[i]));
    }
    return packs;
}

// Tells the compiler a fact that it cannot derive.
__device__ __forceinline__ void assume(bool fact) {
#ifndef CUNORM_CPU
    __builtin_assume(fact);
#endif
}

// Optimisation barrier: the compiler must assume that the value has changed. It recomputes the values derived from it
// where they are used again, instead of keeping them in registers, which are scarce. Such values are widened 16-bit
// elements and the predicates of every element.
__device__ __forceinline__ void make_opaque(int& value) {
#ifndef CUNORM_CPU
    asm volatile("" : "+r"(value));
#endif
}

template <typename T, int size, int count>
__device__ __forceinline__ void make_opaque(Pack<T, size> (&packs)[count]) {
#ifndef CUNORM_CPU
#pragma unroll
    for (int k = 0; k < count; ++k) {
        unsigned (&word)[Pack<T, size>::words] = packs[k].word;
        if constexpr (Pack<T, size>::words == 4) {
            asm volatile("" : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3]));
        } else {
            asm volatile("" : "+r"(word[0]), "+r"(word[1]));
        }
    }
#endif
}

// ---- access to global memory --------------------------------------------------------------------------------------

#ifdef CUNORM_CPU
#define CUNORM_TOUCH(address, bytes, is_store) cunorm_cpu::touch(address, bytes, is_store)
#else
#define CUNORM_TOUCH(address, bytes, is_store)
#endif

template <typename T>
__device__ __forceinline__ T load(const T* array, long long index) {
    CUNORM_TOUCH(array + index, sizeof(T), false);
    return array[index];
}

template <typename T>
__device__ __forceinline__ void store(T* array, long long index, T value) {
    CUNORM_TOUCH(array + index, sizeof(T), true);
    array[index] = value;
}

template <int count, typename T>
__device__ __forceinline__ Pack<T, count> load_whole(const T* address) {
    CUNORM_TOUCH(address, count * sizeof(T), false);
    return *reinterpret_cast<const Pack<T, count>*>(address);
}
template <typename T>
__device__ __forceinline__ Pack<T> load_whole(const T* address) {
    return load_whole<Pack<T>::size>(address);
}

// In PTX, because the compiler splits the store of a struct that it has just assembled into four stores.
template <typename T>
__device__ __forceinline__ void store_whole(T* address, const Pack<T>& pack) {
    CUNORM_TOUCH(address, access_bytes, true);
#ifdef CUNORM_CPU
    *reinterpret_cast<Pack<T>*>(address) = pack;
#else
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(pack.word[0]), "r"(pack.word[1]),
                 "r"(pack.word[2]), "r"(pack.word[3])
                 : "memory");
#endif
}

// The 4-byte words that start at array[index], which are used as counters.
template <typename T>
__device__ __forceinline__ unsigned* words_at(T* array, long long index) {
    return reinterpret_cast<unsigned*>(array + index);
}

// A specialised text claims of each array that it starts at a multiple of 16 bytes. The compiler then knows the
// misalignment of every row whose length it knows. The CPU executor checks the claim.
#ifdef CUNORM_CPU
#define CUNORM_ALIGNED(array) cunorm_cpu::require_aligned(array, access_bytes, #array)
#else
#define CUNORM_ALIGNED(array)           \
    __builtin_assume(array != nullptr); \
    __builtin_assume(reinterpret_cast<unsigned long long>(array) % access_bytes == 0)
#endif

// Number of elements from the 16-byte boundary at or before array[index] to array[index]. If the compiler knows the
// alignment of the array and divisors of the index, it knows the result: it must see the array's own address for that,
// not the address of an element.
template <typename T>
__device__ __forceinline__ int misalignment(const T* array, long long index = 0) {
    constexpr int size = access_bytes / sizeof(T);
    const unsigned long long element = reinterpret_cast<unsigned long long>(array) / sizeof(T) + index;
    return static_cast<int>(element % size);
}

// Whether 0 <= index < length, in one comparison: as an unsigned number, a negative index is large.
__device__ __forceinline__ bool within(int index, int length) {
    return static_cast<unsigned>(index) < static_cast<unsigned>(length);
}

// The elements [first, first + size) of the `length` elements that start at array[row], where size is that of a pack, or
// `count`: one access if all of them exist and the address is a multiple of their bytes, no access if none exists,
// single elements otherwise. Elements outside [0, length) read as zero.
template <int count, typename T>
__device__ __forceinline__ Pack<T, count> load_pack(const T* array, long long row, int first, int length) {
    const bool whole = first >= 0 && first + count <= length;
    if (whole && misalignment(array, row + first) % count == 0) {
        return load_whole<count>(array + row + first);
    }
    Pack<T, count> pack = {};
    if (first >= length || first + count <= 0) {
        return pack;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if (within(first + i, length)) {
            pack.set(i, load(array, row + first + i));
        }
    }
    return pack;
}
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* array, long long row, int first, int length) {
    return load_pack<Pack<T>::size>(array, row, first, length);
}
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* array, int first, int length) {
    return load_pack(array, 0, first, length);
}

template <typename T>
__device__ __forceinline__ void store_pack(T* array, long long row, int first, int length, const Pack<T>& pack) {
    const bool whole = first >= 0 && first + Pack<T>::size <= length;
    if (whole && misalignment(array, row + first) == 0) {
        store_whole(array + row + first, pack);
        return;
    }
    if (first >= length || first + Pack<T>::size <= 0) {
        return;
    }
#pragma unroll
    for (int i = 0; i < Pack<T>::size; ++i) {
        if (within(first + i, length)) {
            store(array, row + first + i, pack.get(i));
        }
    }
}
template <typename T>
__device__ __forceinline__ void store_pack(T* array, int first, int length, const Pack<T>& pack) {
    store_pack(array, 0, first, length, pack);
}

template <typename T>
__device__ __forceinline__ void store_pack(T* array, long long row, int first, int length, const TwoPacks<T>& packs) {
    store_pack(array, row, first, length, packs.half[0]);
    store_pack(array, row, first + packs.size, length, packs.half[1]);
}
template <typename T>
__device__ __forceinline__ void store_pack(T* array, int first, int length, const TwoPacks<T>& packs) {
    store_pack(array, 0, first, length, packs);
}
template <typename T>
__device__ __forceinline__ void store_whole(T* address, const TwoPacks<T>& packs) {
    store_whole(address, packs.half[0]);
    store_whole(address + packs.size, packs.half[1]);
}

// ---- access to shared memory --------------------------------------------------------------------------------------

// The block's dynamic shared memory. The launch sets its size, so a kernel lays its arrays out by offset. The host
// computes the same sizes in the strategies of the op. The CPU executor faults if the host's sum is too small.
#ifdef CUNORM_CPU
__device__ __forceinline__ unsigned char* shared_bytes() {
    return static_cast<unsigned char*>(cunorm_cpu::shared_memory());
}
#define CUNORM_CLAIM_SHARED(bytes) cunorm_cpu::claim_shared(bytes)
#else
extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
__device__ __forceinline__ unsigned char* shared_bytes() { return dynamic_shared_memory; }
#define CUNORM_CLAIM_SHARED(bytes)
#endif

// The array that starts at the first 16-byte boundary at or after `offset`. Advances `offset` past its `count`
// elements.
template <typename T>
__device__ __forceinline__ T* shared_array(int& offset, int count) {
    offset = (offset + access_bytes - 1) / access_bytes * access_bytes;
    T* array = reinterpret_cast<T*>(shared_bytes() + offset);
    offset += count * static_cast<int>(sizeof(T));
    CUNORM_CLAIM_SHARED(offset);
    return array;
}
