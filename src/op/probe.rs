//! What a [check of gradients](crate::check_gradients) has to know of PowerNorm's training steps.
//!
//! The check runs a loss many times, from the same state each time. The variables of a map are
//! known, but a layer's statistics need not be in it. And it has to tell a gradient that the paper
//! approximates from one that is wrong. So while a [`Probe`] lives, the steps of its thread leave
//! both here.

use crate::state::{Snapshot, State};
use candle::Result;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// Each state that a step has moved, as it was before the first.
type Moved = Vec<(Arc<State>, Snapshot)>;

thread_local! {
    static STEPS: RefCell<Option<Moved>> = const { RefCell::new(None) };
    static HAS_APPROXIMATED: Cell<bool> = const { Cell::new(false) };
    static APPROXIMATES: Cell<bool> = const { Cell::new(true) };
}

/// Notes a training forward of a layer with this state, before it moves the state.
pub(super) fn training_forward(state: &Arc<State>, exact: bool) -> Result<()> {
    STEPS.with_borrow_mut(|steps| {
        let Some(steps) = steps else { return Ok(()) };
        if !exact {
            HAS_APPROXIMATED.set(true);
        }
        if !steps.iter().any(|(known, _)| Arc::ptr_eq(known, state)) {
            steps.push((state.clone(), state.snapshot()?));
        }
        Ok(())
    })
}

/// `false` in a backward in which every approximation is 0 instead.
pub(super) fn approximates() -> bool {
    APPROXIMATES.get()
}

/// Watches the training steps of this thread. On drop it restores the statistics.
pub(crate) struct Probe(());

impl Probe {
    /// Begins to watch. Nothing else in this thread may do so meanwhile.
    pub fn begin() -> Result<Self> {
        STEPS.with_borrow_mut(|steps| match steps {
            Some(_) => candle::bail!(
                "check_gradients: expected a loss that computes, got one that calls check_gradients"
            ),
            None => {
                *steps = Some(vec![]);
                HAS_APPROXIMATED.set(false);
                Ok(Self(()))
            }
        })
    }

    /// Gives each layer the statistics that it had before its first step. Layers may share their
    /// variables, so the first snapshot comes last.
    pub fn restore(&self) -> Result<()> {
        STEPS.with_borrow(|steps| {
            let mut steps = steps.iter().flatten().rev();
            steps.try_for_each(|(state, snapshot)| state.restore(snapshot))
        })
    }

    /// `true` if the input's gradient of some step is the paper's approximation.
    pub fn has_approximated(&self) -> bool {
        HAS_APPROXIMATED.get()
    }

    /// Runs `backward` with zeros in place of the approximations.
    pub fn without_approximations<T>(&self, backward: impl FnOnce() -> T) -> T {
        struct Again;
        impl Drop for Again {
            fn drop(&mut self) {
                APPROXIMATES.set(true);
            }
        }
        let _again = Again;
        APPROXIMATES.set(false);
        backward()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // All that can fail here is a device that is gone.
        let _ = self.restore();
        STEPS.set(None);
    }
}
