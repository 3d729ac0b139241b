// The entry points of a kernel: the functions that the host calls with the kernel's name.

namespace cunorm_cpu {

// A kernel parameter in an 8-byte slot. The host packs it by its letter.
template <typename T>
struct Parameter {
    static_assert(sizeof(T) == 0, "kernel parameters are pointers, long long and double only");
};
template <typename T>
struct Parameter<T*> {
    static constexpr char letter = 'P';
};
template <>
struct Parameter<long long> {
    static constexpr char letter = 'q';
};
template <>
struct Parameter<double> {
    static constexpr char letter = 'd';
};

template <typename T>
__forceinline__ T argument(const uint64_t* slot) {
    static_assert(sizeof(T) == sizeof *slot, "64-bit pointers");
    T value;
    memcpy(&value, slot, sizeof value);
    return value;
}

template <int... index>
struct Indices {};
template <int count, int... index>
struct IndicesUpTo : IndicesUpTo<count - 1, count - 1, index...> {};
template <int... index>
struct IndicesUpTo<0, index...> {
    typedef Indices<index...> type;
};

template <typename... T, int... index>
__forceinline__ void call(void (*kernel)(T...), const uint64_t* arguments, Indices<index...>) {
    (void)arguments;  // unused if the kernel has no parameters
    kernel(argument<T>(arguments + index)...);
}
template <typename... T>
__forceinline__ void call(void (*kernel)(T...), const uint64_t* arguments) {
    call(kernel, arguments, typename IndicesUpTo<int(sizeof...(T))>::type{});
}
template <typename... T>
const char* signature(void (*)(T...)) {
    static const char letters[] = {Parameter<T>::letter..., '\0'};
    return letters;
}

}  // namespace cunorm_cpu

// The host appends CUNORM_CPU_ENTRY(name) to the text for each of its kernels, so that they share one build.
// The host calls these functions on its own stack. They have no hooks, which would look for a fiber's header there.
#ifdef CUNORM_CPU_CHECKED
#define CUNORM_CPU_EXPORT extern "C" __attribute__((visibility("default"), no_sanitize("thread"), \
                                                    no_sanitize("alignment")))
#else
#define CUNORM_CPU_EXPORT extern "C" __attribute__((visibility("default")))
#endif
#define CUNORM_CPU_ENTRY(name) \
    CUNORM_CPU_RUNTIME void cunorm_cpu_call_##name(const uint64_t* arguments) { \
        cunorm_cpu::call(&::name, arguments); \
    } \
    CUNORM_CPU_EXPORT const char* cunorm_cpu_signature_##name() { return cunorm_cpu::signature(&::name); } \
    CUNORM_CPU_EXPORT int cunorm_cpu_run_##name(cunorm_cpu::Launch* launch, const cunorm_cpu::Scratch* scratches, \
                                                int count, long long arena_bytes, int text_size, \
                                                const cunorm_cpu::Interpreter* interpreter, int watched) { \
        const cunorm_cpu::Task task = {#name, cunorm_cpu_call_##name, launch, arena_bytes, text_size}; \
        return cunorm_cpu::run(task, scratches, count, *interpreter, watched != 0); \
    }
