//! Compiles the kernels to PTX, and writes in Rust what the kernels and the host have in common.
//! Without the feature `cuda` there is nothing to do.

fn main() {
    // Told to watch nothing else, cargo runs this file once.
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    kernels();
}

#[cfg(feature = "cuda")]
fn kernels() {
    let out_dir = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let read = |path| std::fs::read_to_string(path).expect("a kernel source");
    let params = rust_of_header(&read("kernels/params.cuh"))
        + &rust_of_kernels(&read("kernels/power_norm.cu"));
    std::fs::write(format!("{out_dir}/params.rs"), params).expect("a writable OUT_DIR");
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

/// The constants, constant functions, enums and structs of `kernels/params.cuh` in Rust, so that
/// no number and no layout is written twice.
///
/// The header is written for this function: a constant, a field or an enumerator has a line of its
/// own, and a line that is none of them is an error. nvcc and Rust's `repr(C)` agree on the layout
/// of fields whose types [`rust_type`] lists, and of arrays of them. Any other type of a field must be defined in the
/// header, or the result does not compile.
#[cfg(feature = "cuda")]
fn rust_of_header(header: &str) -> String {
    enum Inside {
        Nothing,
        Function,
        Enum,
        Struct(String),
    }
    let mut rust = String::new();
    let mut inside = Inside::Nothing;
    for line in header.lines() {
        let code = line.split("//").next().unwrap_or_default().trim();
        let words: Vec<&str> = code.split_whitespace().collect();
        match (&inside, &words[..]) {
            (_, []) | (Inside::Nothing, ["#pragma" | "#include", ..]) => {}
            (Inside::Nothing, ["constexpr", "int32_t", name, "=", ..]) => {
                let (_, value) = code.split_once(" = ").unwrap_or_default();
                rust += &format!("pub const {name}: usize = {value}\n");
            }
            (Inside::Nothing, ["constexpr", "__host__", "__device__", "int32_t", .., "{"]) => {
                let (_, head) = code.split_once(" int32_t ").unwrap_or_default();
                let head = head.replace("int32_t ", "").replace(", ", ": usize, ");
                let head = head.replace(") {", ": usize) -> usize {");
                rust += &format!("pub const fn {head}\n");
                inside = Inside::Function;
            }
            (Inside::Function, ["return", ..]) => {
                let value = code.trim_start_matches("return ").trim_end_matches(';');
                rust += &format!("    {value}\n");
            }
            (Inside::Function, ["}"]) => {
                rust += "}\n";
                inside = Inside::Nothing;
            }
            (Inside::Nothing, ["enum", name, ":", number, "{"]) => {
                rust += "#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]\n";
                rust += &format!(
                    "#[repr({})]\npub enum {name} {{\n    #[default]\n",
                    rust_type(number)
                );
                inside = Inside::Enum;
            }
            (Inside::Enum, [variant, "=", number]) => {
                rust += &format!("    {} = {number}\n", camel_case(variant));
            }
            (Inside::Enum, ["};"]) => {
                rust += "}\n";
                inside = Inside::Nothing;
            }
            (Inside::Nothing, ["struct", name, "{"]) => {
                rust += "#[derive(Debug, Clone, Copy, Default)]\n#[repr(C)]\n";
                rust += &format!("pub struct {name} {{\n");
                inside = Inside::Struct((*name).to_owned());
            }
            (Inside::Struct(name), ["};"]) => {
                rust +=
                    "}\n// SAFETY: plain numbers and addresses, laid out as nvcc lays them out.\n";
                rust += &format!("unsafe impl DeviceRepr for {name} {{}}\n");
                inside = Inside::Nothing;
            }
            (Inside::Struct(_), [.., c_type, field]) if field.ends_with(';') => {
                let name = field.trim_end_matches(';').trim_start_matches('*');
                let rust_type = if field.starts_with('*') {
                    "Address"
                } else {
                    rust_type(c_type)
                };
                rust += &match name.trim_end_matches(']').split_once('[') {
                    Some((name, len)) => format!("    pub {name}: [{rust_type}; {len}],\n"),
                    None => format!("    pub {name}: {rust_type},\n"),
                };
            }
            _ => panic!("candle-powernorm: expected a line of C that build.rs knows, got {line}"),
        }
    }
    rust
}

#[cfg(feature = "cuda")]
fn rust_type(c_type: &str) -> &str {
    match c_type {
        "int32_t" => "i32",
        "int64_t" => "i64",
        "float" => "f32",
        "double" => "f64",
        other => other,
    }
}

/// The kernels of `kernels/power_norm.cu`, from the table of its entry points. Each body is a type
/// that names the struct that all entry points of the body take.
#[cfg(feature = "cuda")]
fn rust_of_kernels(source: &str) -> String {
    let mut kernels = std::collections::BTreeMap::new();
    for line in source.lines() {
        let Some(entry) = line.trim().strip_prefix("DEFINE(") else {
            continue;
        };
        let entry = entry.split(')').next().unwrap_or_default();
        let words: Vec<&str> = entry.split(", ").collect();
        let [name, threads, body, params, c_type, ref pieces @ ..] = words[..] else {
            panic!("candle-powernorm: expected an entry point, got {line}")
        };
        // The host finds an entry point by this name, and passes it the argument of its body.
        let dtype = match c_type {
            "float" => "f32",
            "double" => "f64",
            "__half" => "f16",
            "__nv_bfloat16" => "bf16",
            other => panic!("candle-powernorm: expected a type of rows, got {other} in {line}"),
        };
        let expected = [&[body, dtype], pieces].concat().join("_");
        assert_eq!(name, expected, "the name of an entry point");
        let known = *kernels.entry(body).or_insert((params, threads));
        assert_eq!(
            known,
            (params, threads),
            "the entry points of {body} differ"
        );
    }
    let mut rust = String::new();
    for (body, (params, threads)) in kernels {
        let name = camel_case(body);
        rust += &format!("#[derive(Debug, Clone, Copy)]\npub struct {name};\n");
        rust +=
            "// SAFETY: build.rs read the table of the entry points, where each one of this body\n";
        rust += "// takes this argument, and has the name that the host makes of the body.\n";
        rust += &format!("unsafe impl Kernel for {name} {{\n");
        rust += &format!("    type Params = {params};\n");
        rust += &format!("    const BODY: &'static str = \"{body}\";\n");
        rust += &format!("    const MAX_THREADS: usize = {threads};\n}}\n");
    }
    rust
}

/// `ABC_DEF` or `abc_def` as `AbcDef`.
#[cfg(feature = "cuda")]
fn camel_case(name: &str) -> String {
    let mut words = String::new();
    for word in name.split('_') {
        let (first, rest) = word.split_at(word.len().min(1));
        words += &first.to_uppercase();
        words += &rest.to_lowercase();
    }
    words
}
