//! Calls counted, and failures on demand. Both are a thread's own, since tests share a process.

use std::cell::RefCell;
use std::collections::BTreeMap;

/// A thread's counts, and the failure that it awaits.
#[derive(Default)]
struct Thread {
    calls: BTreeMap<&'static str, u64>,
    /// A function, or any that acquires or does something, and how many calls from now fails.
    failure: Option<(Option<String>, u64)>,
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::default();
}

/// Functions that only give back or explain. They fail on demand by name alone: where one fails,
/// something must leak.
fn is_release(function: &str) -> bool {
    ["Free", "Destroy", "Release", "Unload", "GetError", "Abort"]
        .iter()
        .any(|part| function.contains(part))
}

impl Thread {
    /// Counts a call. True: it is to fail.
    fn count(&mut self, function: &'static str) -> bool {
        *self.calls.entry(function).or_default() += 1;
        let Some((name, left)) = &mut self.failure else {
            return false;
        };
        let concerned = match name {
            Some(name) => name == function,
            None => !is_release(function),
        };
        if concerned {
            *left -= 1;
        }
        let fails = concerned && *left == 0;
        if fails {
            self.failure = None;
        }
        fails
    }
}

/// Counts a call, and returns whether it is to fail.
pub fn count(function: &'static str) -> bool {
    // At the end of a thread there is nothing to count for.
    THREAD
        .try_with(|thread| thread.borrow_mut().count(function))
        .unwrap_or(false)
}

/// Has this thread's `n`-th call from now of a function fail. None: of any function but those that
/// give something back. `n` of 0: none.
pub fn fail(function: Option<String>, n: u64) {
    THREAD.with(|thread| thread.borrow_mut().failure = (n > 0).then_some((function, n)));
}

/// The number of calls of a function by this thread. None: of all functions.
pub fn calls(function: Option<&str>) -> u64 {
    THREAD.with(|thread| {
        let thread = thread.borrow();
        match function {
            Some(name) => thread.calls.get(name).copied().unwrap_or(0),
            None => thread.calls.values().sum(),
        }
    })
}

/// This thread's calls by function.
pub fn all_calls() -> BTreeMap<&'static str, u64> {
    THREAD.with(|thread| thread.borrow().calls.clone())
}

/// Has this thread's calls count from 0 again.
pub fn forget_calls() {
    THREAD.with(|thread| thread.borrow_mut().calls.clear());
}
