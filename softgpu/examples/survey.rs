//! Decodes each instruction in files of PTX, runs none, and names those that softgpu does not know.
//!
//! ```sh
//! cargo run --manifest-path softgpu/Cargo.toml --example survey -- [--forms LIST] FILE...
//! ```
//!
//! With `--forms`, it also names the forms of instructions that the file LIST does not have.

use softgpu::isa::ptx::Module;
use std::collections::BTreeSet;

fn read(file: &str) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn main() {
    let mut files: Vec<String> = std::env::args().skip(1).collect();
    let list = match files.first().map(String::as_str) {
        Some("--forms") => files.drain(..2).nth(1),
        _ => None,
    };
    let mut forms = BTreeSet::new();
    let mut unknown = 0;
    for file in &files {
        let module = Module::parse(&read(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let mut found = 0;
        let names: Vec<&str> = module.entries().collect();
        for (entry, name) in names.iter().enumerate() {
            for one in module.unknown(entry) {
                println!("{file}: {name}, {one}");
                found += 1;
            }
            forms.extend(module.forms(entry));
        }
        let (entries, (target, _)) = (names.len(), module.target());
        println!("{file}: {target}, {entries} entries, {found} unknown");
        unknown += found;
    }
    let list = list.map(|list| read(&list));
    let listed: BTreeSet<&str> = list.iter().flat_map(|text| text.lines()).collect();
    println!("{} forms", forms.len());
    if list.is_some() {
        for form in forms.iter().filter(|form| !listed.contains(form.as_str())) {
            println!("{form} is not in the list, so no test compares it with exact arithmetic");
            unknown += 1;
        }
    }
    std::process::exit(i32::from(unknown > 0));
}
