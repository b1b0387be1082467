// Defines: WIDTH of a row, THREADS, ADD (the residual), KEEP (the normed row is wanted as well),
// WEIGHT, the weight's type.
#include "norm_quantize.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_quantize(const __nv_bfloat16* x, const __nv_bfloat16* residual, const WEIGHT* weight,
                  __nv_bfloat16* normed, u8* q, float* scale, __nv_bfloat16* total, float eps,
                  int ue8m0, long long x_stride, long long residual_stride) {
  dependency_release();
  norm_quantize_row<WIDTH, THREADS, ADD, KEEP, WEIGHT>(x, residual, weight, normed, q, scale, total,
                                                       eps, ue8m0, blockIdx.x, x_stride,
                                                       residual_stride);
}
