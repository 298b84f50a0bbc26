//! Decodes each instruction in files of PTX, runs none, and names those that softgpu does not know.

use softgpu::isa::ptx::Module;

fn main() {
    let mut unknown = 0;
    for file in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
        let module = Module::parse(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        let found = module.unknown();
        for one in &found {
            println!("{file}: {one}");
        }
        let entries = module.entries().count();
        println!("{file}: {entries} entries, {} unknown", found.len());
        unknown += found.len();
    }
    std::process::exit(i32::from(unknown > 0));
}
