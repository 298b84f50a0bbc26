// Half precision on the host, under the names of CUDA's header. The kernels only convert.
#pragma once

#include <cstdint>
#include <cstring>

struct __half {
  std::uint16_t bits;
};

inline float __half2float(__half value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  // As a float the magnitude reads too small by the difference of the exponents' biases, subnormal or not.
  std::uint32_t bits = magnitude << 13;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  result *= 0x1p112f;
  std::memcpy(&bits, &result, sizeof(bits));
  // Infinity and NaN have all bits of the exponent set.
  bits = magnitude >= 0x7c00u ? 0x7f800000u | magnitude << 13 : bits;
  bits |= sign;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline __half __float2half_rn(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {
    return {0x7fff}; // the one NaN of the GPU
  } else if (magnitude >= 0x477ff000u) {
    result = 0x7c00u; // from halfway past the largest number on
  } else if (magnitude < 0x38800000u) {
    // A subnormal counts units of 2^-24, as the bits of floats from 1/2 to 1 do: the addition rounds.
    float positive;
    std::memcpy(&positive, &magnitude, sizeof(positive));
    positive += 0.5f;
    std::memcpy(&result, &positive, sizeof(result));
    result -= 0x3f000000u;
  } else {
    // To nearest, ties to even; a carry moves on into the exponent.
    result = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<std::uint16_t>(result | sign)};
}
