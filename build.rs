//! Compiles the kernels to PTX, and writes the structs of their arguments in Rust. Without the
//! feature `cuda` there is nothing to do.

fn main() {
    // Told to watch nothing else, cargo runs this file once.
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    kernels();
}

#[cfg(feature = "cuda")]
fn kernels() {
    let out_dir = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let header = std::fs::read_to_string("kernels/params.cuh").expect("the kernels' header");
    std::fs::write(format!("{out_dir}/params.rs"), params(&header)).expect("a writable OUT_DIR");
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

/// The structs of `kernels/params.cuh` in Rust. The header has a field on each line, of a type that
/// nvcc and Rust's `repr(C)` lay out alike. A type that is not known here must be in
/// `src/device/cuda/params.rs`, or does not compile.
#[cfg(feature = "cuda")]
fn params(header: &str) -> String {
    let mut rust = String::new();
    let mut name = None;
    for line in header.lines() {
        let code = line.split("//").next().unwrap_or_default().trim();
        match (name, code) {
            (None, _) => {
                name = (code.strip_prefix("struct ")).and_then(|code| code.strip_suffix(" {"));
                if let Some(name) = name {
                    rust += "#[derive(Debug, Clone, Copy, Default)]\n#[repr(C)]\n";
                    rust += &format!("pub struct {name} {{\n");
                }
            }
            (Some(_), "") => {}
            (Some(ended), "};") => {
                rust += "}\n// SAFETY: plain numbers in the layout of C, in which nvcc has them.\n";
                rust += &format!("unsafe impl DeviceRepr for {ended} {{}}\n");
                name = None;
            }
            (Some(_), field) => rust += &rust_field(field),
        }
    }
    rust
}

/// A field of a struct in C, `int64_t rows;`, in Rust.
#[cfg(feature = "cuda")]
fn rust_field(field: &str) -> String {
    let words = field
        .strip_suffix(';')
        .and_then(|field| field.rsplit_once(' '));
    let Some((c_type, field)) = words else {
        panic!("candle-powernorm: expected a field on a line of kernels/params.cuh, got {field}")
    };
    let rust_type = match (field.starts_with('*'), c_type) {
        (true, _) => "Address",
        (false, "int32_t") => "i32",
        (false, "int64_t") => "i64",
        (false, "double") => "f64",
        (false, other) => other,
    };
    format!("    pub {}: {rust_type},\n", field.trim_start_matches('*'))
}
