//! Compiles the kernels for the host, under AddressSanitizer and UBSan.

fn main() {
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("src/device.cpp")
        .include("include")
        // Sanitized code is slow as it is.
        .opt_level(2)
        .debug(true)
        .flag("-fsanitize=address,undefined")
        .flag("-fno-sanitize-recover=all")
        // `#pragma unroll` is nvcc's.
        .flag("-Wno-unknown-pragmas")
        .extra_warnings(true)
        .warnings_into_errors(true)
        // Named below, after the sanitizers'.
        .cpp_link_stdlib(None)
        .compile("emulated_kernels");
    // AddressSanitizer replaces malloc, so its library comes before all others.
    for library in ["asan", "ubsan", "stdc++"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
    for path in ["../kernels", "include", "src/device.cpp", "src/probes.h"] {
        println!("cargo:rerun-if-changed={path}");
    }
}
