// All kernels.
#include "engine.cu"
#include "collective.cu"
