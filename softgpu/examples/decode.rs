//! Decodes all entries of PTX files and tells what is unknown.
use softgpu::ptx::Module;
use std::time::Instant;

fn main() {
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).unwrap();
        let start = Instant::now();
        let module = match Module::parse(&text) {
            Ok(module) => module,
            Err(error) => {
                println!("{path}: {error}");
                continue;
            }
        };
        let parsed = start.elapsed();
        let names: Vec<String> = module.entries().map(str::to_owned).collect();
        let mut unknown = 0;
        for (entry, name) in names.iter().enumerate() {
            match module.unknown(entry) {
                Ok(all) => {
                    unknown += all.len();
                    for one in all.iter().take(3) {
                        println!("{name}: {one}");
                    }
                }
                Err(error) => println!("{name}: {error}"),
            }
        }
        println!("{path}: {} entries, parsed in {parsed:?}, all decoded in {:?}, {unknown} unknown", names.len(), start.elapsed());
    }
}
