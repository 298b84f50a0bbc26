//! What the processor has and the build leaves unused.

/// Says on standard error from which switches of the build candle would gain on this processor;
/// with `half_precision` also from those that concern bf16 and f16 alone.
pub fn warn_of_unused(half_precision: bool) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx512f") && !cfg!(feature = "avx512") {
            eprintln!(
                "Built without the feature avx512, so candle's products of matrices leave this \
                 processor's AVX-512 unused."
            );
        }
        let has_f16 = has!("f16c") && !cfg!(target_feature = "f16c");
        let has_bf16 = has!("avx512bf16") && !cfg!(target_feature = "avx512bf16");
        if half_precision && (has_f16 || has_bf16) {
            eprintln!(
                "Built without RUSTFLAGS=\"-C target-cpu=native\", so candle's additions of half \
                 precision are slow."
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = half_precision;
}
