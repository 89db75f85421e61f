// A CUDA driver without a device: it takes the kernels that Triton's launcher gives it, checks what a driver would
// refuse, and runs nothing. Built and used by `launched.py`.

#include "cuda.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REFUSE(...)                                  \
  do {                                               \
    snprintf(said, sizeof said, __VA_ARGS__);        \
    return CUDA_ERROR_INVALID_VALUE;                 \
  } while (0)

enum { SHARED = 232448, THREADS = 1024, PROCESSORS = 132 };  // an H100's

typedef struct {
  char name[256];
  unsigned shared;  // bytes of dynamic shared memory that are allowed
} Function;

static _Thread_local char said[512];

CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = said;
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = 12080;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = SHARED + 1024; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = PROCESSORS; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)said;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) { return cuDeviceGet(device, 0); }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (memcmp(image, "\177ELF", 4)) REFUSE("a module that is no machine code");
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Function *made = calloc(1, sizeof *made);
  snprintf(made->name, sizeof made->name, "%s", name);
  made->shared = 49152;
  *function = (CUfunction)made;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? THREADS : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value > SHARED) REFUSE("%d bytes of shared memory, of %d", value, SHARED);
    ((Function *)function)->shared = value;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *which, void **values, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++) *(CUdeviceptr *)values[i] = pointer;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  const Function *f = (const Function *)function;
  unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  if (!config->gridDimX || !config->gridDimY || !config->gridDimZ || config->gridDimX > 0x7fffffff ||
      config->gridDimY > 65535 || config->gridDimZ > 65535)
    REFUSE("%s: a grid of %u, %u, %u", f->name, config->gridDimX, config->gridDimY, config->gridDimZ);
  if (!threads || threads > THREADS) REFUSE("%s: %u threads", f->name, threads);
  if (config->sharedMemBytes > f->shared)
    REFUSE("%s: %u bytes of shared memory, of %u", f->name, config->sharedMemBytes, f->shared);
  int early = 0;
  for (unsigned i = 0; i < config->numAttrs; i++)
    early |= config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  if (getenv("LAUNCHES")) {
    FILE *file = fopen(getenv("LAUNCHES"), "a");
    fprintf(file, "%s%s\n", f->name, early ? " early" : "");
    fclose(file);
  }
  return CUDA_SUCCESS;
}

// The rules are those of CUDA's driver API, section "Tensor Map Object Management".
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const unsigned bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}, spans[] = {~0u, 32, 64, 128};
  if ((size_t)map % 64 || (size_t)address % 16) REFUSE("a block that begins at %p", address);
  if (!rank || rank > 5) REFUSE("a block of %u dimensions", rank);
  for (unsigned i = 0; i < rank; i++) {
    if (!sizes[i] || sizes[i] > 1ull << 32) REFUSE("a tensor of size %llu", (unsigned long long)sizes[i]);
    if (!box[i] || box[i] > 256) REFUSE("a block of size %u", box[i]);
    if (!steps[i] || steps[i] > 8) REFUSE("a step of %u", steps[i]);
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40))
      REFUSE("a stride of %llu bytes", (unsigned long long)strides[i]);
  }
  unsigned inner = box[0] * bytes[type];
  if (inner % 16 || (swizzle < 4 && inner > spans[swizzle])) REFUSE("%u bytes in a row of a block", inner);
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

