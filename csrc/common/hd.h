// BIPACE_HD: a function for host and device, tested on the CPU.  Includes no host header under a GPU's run-time
// compiler (NVRTC), which has none.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cmath>
#include <cstdint>
#endif

#ifdef __CUDACC__
#define BIPACE_HD __host__ __device__
#else
#define BIPACE_HD
#endif
