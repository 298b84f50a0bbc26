//! Trains models with PowerNorm and with other normalizations, and compares them.
//!
//! ```text
//! cargo lab study --text shakespeare.txt
//! cargo lab translate --data multi30k
//! ```
//!
//! `--help` after a command lists its options. With `--features cuda`, each has `--device cuda`.

mod common;
mod study;
#[path = "../../benches/common/threads.rs"]
mod threads;
mod translate;

use clap::Parser;
use std::process::ExitCode;

/// glibc's allocator gives large blocks back to the system at every free, and they come back as
/// page faults: almost a third of a step.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Debug, Parser)]
#[command(about)]
enum Command {
    Study(study::Args),
    Translate(translate::Args),
}

fn main() -> ExitCode {
    threads::set_threads();
    let result = match Command::parse() {
        Command::Study(args) => study::run(&args),
        Command::Translate(args) => translate::run(&args, &mut std::io::stdout()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
