# CUDA kernels: whether, for which architectures, and the module _cuda.
#
#   BIPACE_CUDA=auto   for the GPUs of this machine where nvcc is, else none: a GPU is what they are for, and every
#                      architecture costs a compilation.  BIPACE_CUDA_ARCHS asks for them where there is no GPU.
#   BIPACE_CUDA=1      for all architectures of a release; fails where nvcc is missing
#   BIPACE_CUDA=0      none
#
# The decision is printed, stands in _native.cuda_decision, and its last word is in bipace_cuda.txt of the build folder.
set(bipace_cuda_release 80 90 100 120)  # code of 8.0 runs on 8.6 and 8.9

function(bipace_gpus result)  # compute capabilities of the GPUs here, e.g. 90
  find_program(BIPACE_NVIDIA_SMI nvidia-smi)
  set(found "")
  if(BIPACE_NVIDIA_SMI)
    execute_process(COMMAND ${BIPACE_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE lines ERROR_QUIET RESULT_VARIABLE failed TIMEOUT 60)
    if(NOT failed)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${lines}")
      string(REPLACE "." "" found "${found}")
      list(REMOVE_DUPLICATES found)
    endif()
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

set(bipace_cuda OFF)
set(bipace_cuda_archs "${BIPACE_CUDA_ARCHS}")
string(TOLOWER "${BIPACE_CUDA}" wanted)
if(wanted STREQUAL "0" OR BIPACE_SANITIZE)
  set(bipace_cuda_decision "no CUDA kernels: built with BIPACE_CUDA=0")
else()
  if(NOT wanted STREQUAL "1" AND NOT wanted STREQUAL "auto")
    message(FATAL_ERROR "BIPACE_CUDA must be auto, 0 or 1, got '${BIPACE_CUDA}'.")
  endif()
  if(DEFINED ENV{CUDACXX})
    set(BIPACE_NVCC "$ENV{CUDACXX}")
  endif()
  find_program(BIPACE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(wanted STREQUAL "1")
    if(NOT BIPACE_NVCC)
      message(FATAL_ERROR "BIPACE_CUDA=1 needs nvcc of the CUDA toolkit 12.8 or newer, and none is on the PATH, in CUDA_HOME or "
        "in /usr/local/cuda; install the toolkit, or leave BIPACE_CUDA=auto.")
    endif()
    if(NOT bipace_cuda_archs)
      set(bipace_cuda_archs ${bipace_cuda_release})
    endif()
    set(bipace_cuda ON)
  elseif(NOT BIPACE_NVCC)
    set(bipace_cuda_decision "no CUDA kernels: nvcc was not found when this was built (BIPACE_CUDA=auto)")
  else()
    if(NOT bipace_cuda_archs)
      bipace_gpus(bipace_cuda_archs)
    endif()
    if(bipace_cuda_archs)
      set(bipace_cuda ON)
    else()
      set(bipace_cuda_decision
        "no CUDA kernels: nvcc was there when this was built, but no GPU to build for (BIPACE_CUDA=auto, 1 builds for all)")
    endif()
  endif()
endif()

if(bipace_cuda)
  list(SORT bipace_cuda_archs COMPARE NATURAL)
  list(REMOVE_DUPLICATES bipace_cuda_archs)
  # Machine code for each, and PTX of the newest, which later GPUs compile for themselves.  Of 9.0 the code that has all its
  # instructions (BIPACE_WARPGROUPS of csrc/cuda/intrinsics.h); there is no GPU of 9.0 that lacks any.
  list(GET bipace_cuda_archs -1 newest)
  string(REPLACE "a" "" newest "${newest}")
  list(TRANSFORM bipace_cuda_archs REPLACE "^90a?$" "90a")
  list(REMOVE_DUPLICATES bipace_cuda_archs)
  # Those with a letter go to nvcc as options: CMake 3.24 takes nothing but numbers in CMAKE_CUDA_ARCHITECTURES.
  set(CMAKE_CUDA_ARCHITECTURES ${bipace_cuda_archs})
  list(FILTER CMAKE_CUDA_ARCHITECTURES INCLUDE REGEX "^[0-9]+$")
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES APPEND "-real")
  list(APPEND CMAKE_CUDA_ARCHITECTURES "${newest}-virtual")
  set(bipace_cuda_lettered ${bipace_cuda_archs})
  list(FILTER bipace_cuda_lettered EXCLUDE REGEX "^[0-9]+$")
  list(TRANSFORM bipace_cuda_lettered REPLACE "(.+)" "--generate-code=arch=compute_\\1,code=sm_\\1")
  list(TRANSFORM bipace_cuda_archs PREPEND "sm_" OUTPUT_VARIABLE bipace_cuda_built)
  list(APPEND bipace_cuda_built "compute_${newest}")
  list(JOIN bipace_cuda_built " " bipace_cuda_built)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${BIPACE_NVCC})
  endif()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "the CUDA kernels need nvcc 12.8 or newer, got ${CMAKE_CUDA_COMPILER_VERSION} at "
      "${CMAKE_CUDA_COMPILER}; point CUDACXX at a newer one, or set BIPACE_CUDA=0.")
  endif()
  set(bipace_cuda_decision "CUDA kernels by nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${bipace_cuda_built}")
  find_package(CUDAToolkit REQUIRED)

  file(GLOB bipace_cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/*.cu)  # a stage is a file
  # An object library, for a kernel makes itself known by a static object, which an archive would lose.
  add_library(bipace_cuda OBJECT ${bipace_cuda_sources} csrc/cuda/launch.cpp)
  target_include_directories(bipace_cuda PRIVATE csrc ${CUDAToolkit_INCLUDE_DIRS})
  set_target_properties(bipace_cuda PROPERTIES
    CUDA_VISIBILITY_PRESET hidden)
  file(STRINGS csrc/cuda/flags.txt bipace_cuda_flags REGEX "^-")
  target_compile_options(bipace_cuda PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:${bipace_cuda_flags}>"
    "$<$<COMPILE_LANGUAGE:CUDA>:${bipace_cuda_lettered}>"
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xfatbin -compress-all>"
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow>)
  set_source_files_properties(csrc/cuda/launch.cpp PROPERTIES
    COMPILE_DEFINITIONS "BIPACE_CUDA_BUILT=\"${bipace_cuda_built}\"")

  pybind11_add_module(_cuda MODULE NO_EXTRAS csrc/bindings/cuda.cpp)
  target_include_directories(_cuda PRIVATE csrc)
  # The runtime goes inside: whatever CUDA torch brings, or none, is no matter of ours.
  target_link_libraries(_cuda PRIVATE bipace_cuda CUDA::cudart_static)
  set_target_properties(_cuda PROPERTIES LINKER_LANGUAGE CXX)
  target_link_options(_cuda PRIVATE -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL -Wl,--as-needed)
else()
  add_custom_target(_cuda)
endif()
message(STATUS "bipace_kernels: ${bipace_cuda_decision}")
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/bipace_cuda.txt "${bipace_cuda}\n${bipace_cuda_decision}\n")
