//! Compiles the kernels to PTX. Without the feature `cuda` there is nothing to do.

fn main() {
    // Told to watch nothing else, cargo runs this file once.
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    kernels();
}

#[cfg(feature = "cuda")]
fn kernels() {
    let out_dir = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let ptx = cudaforge::KernelBuilder::new()
        .source_files(["kernels/power_norm.cu"])
        // Headers too: cargo runs this file again, and the compiler's cache is stale, when one
        // changes.
        .watch(["kernels"])
        .arg("-std=c++17")
        .arg("-O3")
        .build_ptx();
    let written = ptx.and_then(|ptx| ptx.write(format!("{out_dir}/ptx.rs")));
    if let Err(error) = written {
        panic!("candle-powernorm: nvcc could not compile kernels/power_norm.cu: {error}");
    }
}
