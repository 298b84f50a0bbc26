//! The kernels' PTX, as text.

use std::collections::HashMap;
use std::sync::OnceLock;

// Defines `POWER_NORM`.
include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The kernels' PTX, cut up so that each kernel can be loaded as a module of its own. The driver
/// compiles all of a module when it loads one, and a training step launches four of the kernels.
pub struct Modules {
    /// Everything outside the entry points: version, target, and the declaration of shared memory.
    shared: String,
    /// The text of each entry point, by its name.
    entries: HashMap<&'static str, &'static str>,
}

impl Modules {
    /// The modules of the PTX that `build.rs` compiled, which is cut up on the first use.
    pub fn compiled() -> &'static Self {
        static MODULES: OnceLock<Modules> = OnceLock::new();
        MODULES.get_or_init(|| Modules::cut(POWER_NORM))
    }

    fn cut(ptx: &'static str) -> Self {
        const ENTRY: &str = ".visible .entry ";
        let (mut shared, mut entries) = (String::new(), HashMap::new());
        let mut rest = ptx;
        while let Some(start) = rest.find(ENTRY) {
            let (before, from_entry) = rest.split_at(start);
            let (entry, after) = from_entry.split_at(end_of_body(from_entry));
            let name = entry[ENTRY.len()..].split('(').next().unwrap_or_default();
            entries.insert(name.trim_end(), entry);
            shared += before;
            rest = after;
        }
        shared += rest;
        Self { shared, entries }
    }

    /// Names and texts of the entry points.
    #[cfg(test)]
    pub fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(name, entry)| (*name, *entry))
    }

    /// The PTX of a module that has this kernel and no other, if there is such a kernel.
    pub fn of(&self, kernel: &str) -> Option<String> {
        let entry = self.entries.get(kernel)?;
        Some(format!("{}\n{entry}\n", self.shared))
    }
}

/// Bytes of PTX up to and including the brace that closes the first body. Braces are counted,
/// because those of a vector of registers stand inside a body.
fn end_of_body(ptx: &str) -> usize {
    let (mut depth, mut line_start) = (0, 0);
    for line in ptx.split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default();
        for (at, letter) in code.char_indices() {
            match letter {
                '{' => depth += 1,
                '}' if depth == 1 => return line_start + at + 1,
                '}' => depth -= 1,
                _ => {}
            }
        }
        line_start += line.len();
    }
    ptx.len()
}

/// `true` if the kernels were compiled for GPUs that copy into shared memory asynchronously:
/// compute capability 8.0 and later. A later GPU may run kernels of an earlier one.
pub fn kernels_copy() -> bool {
    target(POWER_NORM) >= Some(80)
}

/// The compute capability that PTX was compiled for, as in `sm_90a`: 90.
fn target(ptx: &str) -> Option<u32> {
    let (_, target) = ptx.split_once(".target sm_")?;
    target
        .split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const ENTRY: &str = ".entry ";

    /// Every entry point of `kernels/power_norm.cu` has a module, and the module has no other.
    #[test]
    fn every_kernel_has_a_module_of_its_own() {
        let source = include_str!("../../../kernels/power_norm.cu");
        let defined: BTreeSet<&str> = source
            .lines()
            .filter_map(|line| line.trim().strip_prefix("DEFINE(")?.split(',').next())
            .collect();
        assert!(!defined.is_empty());
        let modules = Modules::compiled();
        assert_eq!(
            modules.entries.keys().copied().collect::<BTreeSet<_>>(),
            defined
        );
        for kernel in defined {
            let module = modules.of(kernel).unwrap();
            let entries: Vec<&str> = module.split(ENTRY).skip(1).collect();
            assert_eq!(entries.len(), 1, "{kernel}");
            let name = entries[0].split('(').next();
            assert_eq!(name, Some(kernel));
            assert!(module.trim_start().starts_with("//") && module.contains(".version"));
            // Its body is whole.
            assert!(entries[0].contains("ret;"), "{kernel}");
            let count = |brace| module.matches(brace).count();
            assert_eq!(count('{'), count('}'), "{kernel}");
        }
        assert_eq!(modules.of("normalize_f32"), None);
    }

    /// Braces may stand anywhere, and text between entry points belongs to all of them.
    #[test]
    fn ptx_is_cut_by_its_braces() {
        let ptx = ".version 8.0\n.visible .entry one()\n{ { mov.v2 {%r1, %r2}, x; // }\n } }\n\
            .global .b32 number;\n.visible .entry two (.param .u64 p)\n{ ret; }";
        let modules = Modules::cut(ptx);
        assert_eq!(modules.shared, ".version 8.0\n\n.global .b32 number;\n");
        let [one, two] = ["one", "two"].map(|name| modules.entries[name]);
        assert!(
            one.starts_with(".visible .entry one()") && one.ends_with("// }\n } }"),
            "{one}"
        );
        assert!(two.ends_with("{ ret; }"), "{two}");
        assert_eq!(modules.entries.len(), 2);
    }

    #[test]
    fn target_is_a_number() {
        let targets = ["sm_75", "sm_80", "sm_90a", "sm_100a"];
        let numbers = targets.map(|name| target(&format!(".version 9.0\n.target {name}\n")));
        assert_eq!(numbers, [Some(75), Some(80), Some(90), Some(100)]);
        assert_eq!(target(".version 9.0"), None);
        assert!(target(POWER_NORM) >= Some(50));
    }
}
