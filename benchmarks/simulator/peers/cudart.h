// A CUDA runtime whose device is the simulator. PyTorch's libraries call it in place of libcudart.so.13, so that they
// choose kernels, grids and arguments themselves.
//
// Device memory is memory of this process. Launches go to `on_launch`. Streams and events have no effect: everything is
// executed in order. Functions that PyTorch links against but that these calls do not need end the process with their
// name.

typedef int Status;
constexpr Status SUCCESS = 0, NOT_SUPPORTED = 801, OUT_OF_MEMORY = 2, INVALID = 1;

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Dimensions {
    unsigned x, y, z;
};

// Returns 0, or an error of the CUDA runtime.
typedef Status (*OnLaunch)(const char* name, const unsigned* sizes, unsigned long long shared, void** arguments);
typedef void (*OnFill)(void* at, int value, unsigned long long bytes);

struct Facts {
    int multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor, registers_per_multiprocessor;
    int shared_per_block, shared_per_block_optin, shared_per_multiprocessor, shared_reserved, l2_bytes, major, minor;
    unsigned long long memory;
};

static OnLaunch on_launch = nullptr;
static OnFill on_fill = nullptr;
static Facts facts;
static std::mutex guard;
static std::map<const void*, std::string> names;    // of kernels, by the addresses of their host functions
static std::map<char*, unsigned long long> memory;  // allocations: address, bytes
static thread_local Status last = 0;
static thread_local struct {
    Dimensions grid, block;
    size_t shared;
    void* stream;
} pushed;

EXPORT void peers_configure(const Facts* given, OnLaunch launch, OnFill fill) {
    facts = *given;
    on_launch = launch;
    on_fill = fill;
}
// Copies up to `room` pairs (address, bytes) of allocations; returns their number.
EXPORT int peers_memory(unsigned long long* pairs, int room) {
    const std::lock_guard<std::mutex> lock(guard);
    int count = 0;
    for (const auto& [address, bytes] : memory) {
        if (count < room) {
            pairs[2 * count] = reinterpret_cast<unsigned long long>(address);
            pairs[2 * count + 1] = bytes;
        }
        ++count;
    }
    return count;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

EXPORT void** __cudaRegisterFatBinary(void* image) { return static_cast<void**>(image); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                   int*) {
    const std::lock_guard<std::mutex> lock(guard);
    names[host] = name;
}
EXPORT unsigned __cudaPushCallConfiguration(Dimensions grid, Dimensions block, size_t shared, void* stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
EXPORT Status __cudaPopCallConfiguration(Dimensions* grid, Dimensions* block, size_t* shared, void* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *static_cast<void**>(stream) = pushed.stream;
    return SUCCESS;
}
EXPORT Status __cudaGetKernel(const void** kernel, const void* host) {
    *kernel = host;
    return SUCCESS;
}
EXPORT Status __cudaLaunchKernel(const void* host, Dimensions grid, Dimensions block, void** arguments, size_t shared,
                                 void*) {
    std::string name;
    {
        const std::lock_guard<std::mutex> lock(guard);
        const auto found = names.find(host);
        if (found == names.end() || on_launch == nullptr) return INVALID;
        name = found->second;
    }
    const unsigned sizes[6] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
    return last = on_launch(name.c_str(), sizes, shared, arguments);
}
EXPORT Status cudaLaunchKernel(const void* host, Dimensions grid, Dimensions block, void** arguments, size_t shared,
                               void* stream) {
    return __cudaLaunchKernel(host, grid, block, arguments, shared, stream);
}

// ---- memory ---------------------------------------------------------------------------------------------------------

EXPORT Status cudaMalloc(void** into, size_t bytes) {
    const size_t whole = (bytes + 4095) / 4096 * 4096;
    char* at = static_cast<char*>(aligned_alloc(4096, whole));
    if (at == nullptr) return OUT_OF_MEMORY;
    const std::lock_guard<std::mutex> lock(guard);
    memory[at] = whole;
    *into = at;
    return SUCCESS;
}
EXPORT Status cudaFree(void* at) {
    const std::lock_guard<std::mutex> lock(guard);
    memory.erase(static_cast<char*>(at));
    free(at);
    return SUCCESS;
}
EXPORT Status cudaHostAlloc(void** into, size_t bytes, unsigned) {
    *into = malloc(bytes);
    return *into ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT Status cudaFreeHost(void* at) {
    free(at);
    return SUCCESS;
}
EXPORT Status cudaMemcpy(void* to, const void* from, size_t bytes, int) {
    memmove(to, from, bytes);
    return SUCCESS;
}
EXPORT Status cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void*) {
    memmove(to, from, bytes);
    return SUCCESS;
}
EXPORT Status cudaMemset(void* at, int value, size_t bytes) {
    memset(at, value, bytes);
    if (on_fill) on_fill(at, value, bytes);
    return SUCCESS;
}
EXPORT Status cudaMemsetAsync(void* at, int value, size_t bytes, void*) { return cudaMemset(at, value, bytes); }
EXPORT Status cudaMemGetInfo(size_t* available, size_t* total) {
    *available = *total = facts.memory;
    return SUCCESS;
}
// cudaPointerAttributes: type (2: device memory, 0: unknown to CUDA), device, device pointer, host pointer.
EXPORT Status cudaPointerGetAttributes(void* into, const void* at) {
    struct Attributes {
        int type, device;
        const void *on_device, *on_host;
        long reserved[8];
    };
    const std::lock_guard<std::mutex> lock(guard);
    auto found = memory.upper_bound(static_cast<char*>(const_cast<void*>(at)));
    bool known = found != memory.begin();
    if (known) {
        --found;
        known = static_cast<const char*>(at) < found->first + found->second;
    }
    auto* attributes = static_cast<Attributes*>(into);
    *attributes = {known ? 2 : 0, 0, known ? at : nullptr, known ? nullptr : at, {}};
    return SUCCESS;
}

// ---- the device -----------------------------------------------------------------------------------------------------

EXPORT Status cudaGetDeviceCount(int* count) {
    *count = 1;
    return SUCCESS;
}
EXPORT Status cudaGetDevice(int* device) {
    *device = 0;
    return SUCCESS;
}
EXPORT Status cudaSetDevice(int) { return SUCCESS; }
EXPORT Status cudaDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}
EXPORT Status cudaRuntimeGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}
EXPORT Status cudaGetDeviceProperties(cudaDeviceProp* into, int) {
    memset(into, 0, sizeof *into);
    strcpy(into->name, "simulator");
    into->totalGlobalMem = facts.memory;
    into->sharedMemPerBlock = static_cast<size_t>(facts.shared_per_block);
    into->sharedMemPerBlockOptin = static_cast<size_t>(facts.shared_per_block_optin);
    into->sharedMemPerMultiprocessor = static_cast<size_t>(facts.shared_per_multiprocessor);
    into->reservedSharedMemPerBlock = static_cast<size_t>(facts.shared_reserved);
    into->regsPerBlock = 65536;
    into->regsPerMultiprocessor = facts.registers_per_multiprocessor;
    into->warpSize = 32;
    into->maxThreadsPerBlock = 1024;
    into->maxThreadsPerMultiProcessor = facts.threads_per_multiprocessor;
    into->maxBlocksPerMultiProcessor = facts.blocks_per_multiprocessor;
    into->maxThreadsDim[0] = into->maxThreadsDim[1] = 1024;
    into->maxThreadsDim[2] = 64;
    into->maxGridSize[0] = 2147483647;
    into->maxGridSize[1] = into->maxGridSize[2] = 65535;
    into->major = facts.major;
    into->minor = facts.minor;
    into->multiProcessorCount = facts.multiprocessors;
    into->l2CacheSize = facts.l2_bytes;
    into->unifiedAddressing = into->managedMemory = into->concurrentKernels = 1;
    into->memPitch = 2147483647;
    into->textureAlignment = 512;
    return SUCCESS;
}
// The attributes by the numbers of cudaDeviceAttr.
EXPORT Status cudaDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 1:
            *value = 1024;
            return SUCCESS;  // threads per block
        case 8:
            *value = facts.shared_per_block;
            return SUCCESS;
        case 10:
            *value = 32;
            return SUCCESS;  // lanes of a warp
        case 16:
            *value = facts.multiprocessors;
            return SUCCESS;
        case 39:
            *value = facts.threads_per_multiprocessor;
            return SUCCESS;
        case 75:
            *value = facts.major;
            return SUCCESS;
        case 76:
            *value = facts.minor;
            return SUCCESS;
        case 81:
            *value = facts.shared_per_multiprocessor;
            return SUCCESS;
        case 97:
            *value = facts.shared_per_block_optin;
            return SUCCESS;
        default:
            *value = 0;
            return SUCCESS;
    }
}
EXPORT Status cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return SUCCESS;
}
EXPORT Status cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return SUCCESS;
}
EXPORT Status cudaDeviceSynchronize() { return SUCCESS; }
EXPORT Status cudaGetLastError() { return std::exchange(last, SUCCESS); }
EXPORT Status cudaPeekAtLastError() { return last; }
EXPORT const char* cudaGetErrorName(Status status) { return status == SUCCESS ? "no error" : "error"; }
EXPORT const char* cudaGetErrorString(Status status) {
    return status == SUCCESS ? "no error" : "the simulator refused; the message is in Python";
}
EXPORT Status cudaGetDriverEntryPointByVersion(const char*, void** into, unsigned, unsigned long long, int* found) {
    *into = nullptr;
    if (found) *found = 1;  // symbol not found
    return NOT_SUPPORTED;
}
EXPORT Status cudaFuncSetAttribute(const void*, int, int) { return SUCCESS; }

// ---- streams and events ---------------------------------------------------------------------------------------------

static Status handle(void** into) {
    static long next = 1;
    *into = reinterpret_cast<void*>(next++ << 12);
    return SUCCESS;
}
EXPORT Status cudaStreamCreate(void** into) { return handle(into); }
EXPORT Status cudaStreamCreateWithFlags(void** into, unsigned) { return handle(into); }
EXPORT Status cudaStreamCreateWithPriority(void** into, unsigned, int) { return handle(into); }
EXPORT Status cudaStreamDestroy(void*) { return SUCCESS; }
EXPORT Status cudaStreamSynchronize(void*) { return SUCCESS; }
EXPORT Status cudaStreamQuery(void*) { return SUCCESS; }
EXPORT Status cudaStreamWaitEvent(void*, void*, unsigned) { return SUCCESS; }
EXPORT Status cudaStreamGetPriority(void*, int* priority) {
    *priority = 0;
    return SUCCESS;
}
EXPORT Status cudaStreamIsCapturing(void*, int* status) {
    *status = 0;
    return SUCCESS;
}
EXPORT Status cudaStreamGetCaptureInfo(void*, int* status, unsigned long long* id) {
    *status = 0;
    if (id) *id = 0;
    return SUCCESS;
}
EXPORT Status cudaThreadExchangeStreamCaptureMode(int*) { return SUCCESS; }
EXPORT Status cudaEventCreate(void** into) { return handle(into); }
EXPORT Status cudaEventCreateWithFlags(void** into, unsigned) { return handle(into); }
EXPORT Status cudaEventDestroy(void*) { return SUCCESS; }
EXPORT Status cudaEventRecord(void*, void*) { return SUCCESS; }
EXPORT Status cudaEventRecordWithFlags(void*, void*, unsigned) { return SUCCESS; }
EXPORT Status cudaEventQuery(void*) { return SUCCESS; }
EXPORT Status cudaEventSynchronize(void*) { return SUCCESS; }
EXPORT Status cudaEventElapsedTime(float* milliseconds, void*, void*) {
    *milliseconds = 0;
    return SUCCESS;
}
EXPORT Status cudaProfilerStart() { return SUCCESS; }
EXPORT Status cudaProfilerStop() { return SUCCESS; }

// ---- not implemented ------------------------------------------------------------------------------------------------

#define ABSENT(name)                                                                                            \
    EXPORT Status name() {                                                                                      \
        fprintf(stderr, "%s: the simulator's CUDA runtime does not implement it; add it to cudart.h\n", #name); \
        abort();                                                                                                \
    }
// clang-format off
ABSENT(__cudaInitModule)
ABSENT(cudaDeviceEnablePeerAccess)
ABSENT(cudaDeviceGetDefaultMemPool)
ABSENT(cudaDeviceGetGraphMemAttribute)
ABSENT(cudaDeviceGetPCIBusId)
ABSENT(cudaDeviceSetGraphMemAttribute)
ABSENT(cudaFreeAsync)
ABSENT(cudaFuncGetAttributes)
ABSENT(cudaGetSymbolAddress)
ABSENT(cudaGraphAddNode)
ABSENT(cudaGraphConditionalHandleCreate)
ABSENT(cudaGraphDestroy)
ABSENT(cudaGraphExecDestroy)
ABSENT(cudaGraphGetNodes)
ABSENT(cudaGraphInstantiateWithFlags)
ABSENT(cudaGraphLaunch)
ABSENT(cudaGraphNodeGetDependencies)
ABSENT(cudaGraphRetainUserObject)
ABSENT(cudaHostRegister)
ABSENT(cudaHostUnregister)
ABSENT(cudaIpcCloseMemHandle)
ABSENT(cudaIpcGetEventHandle)
ABSENT(cudaIpcGetMemHandle)
ABSENT(cudaIpcOpenEventHandle)
ABSENT(cudaIpcOpenMemHandle)
ABSENT(cudaKernelSetAttributeForDevice)
ABSENT(cudaLaunchCooperativeKernel)
ABSENT(cudaLaunchHostFunc)
ABSENT(cudaLaunchKernelExC)
ABSENT(cudaLibraryGetKernel)
ABSENT(cudaLibraryLoadData)
ABSENT(cudaLibraryUnload)
ABSENT(cudaMallocAsync)
ABSENT(cudaMemPoolGetAttribute)
ABSENT(cudaMemPoolSetAccess)
ABSENT(cudaMemPoolSetAttribute)
ABSENT(cudaMemPoolTrimTo)
ABSENT(cudaMemcpy2DAsync)
ABSENT(cudaMemcpyPeerAsync)
ABSENT(cudaMemcpyToSymbol)
ABSENT(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
ABSENT(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
ABSENT(cudaStreamAddCallback)
ABSENT(cudaStreamBeginCapture)
ABSENT(cudaStreamBeginCaptureToGraph)
ABSENT(cudaStreamEndCapture)
ABSENT(cudaStreamUpdateCaptureDependencies)
ABSENT(cudaUserObjectCreate)
ABSENT(cudaUserObjectRelease)
// clang-format on
