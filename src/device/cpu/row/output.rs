//! Outputs that are written once: allocated without values, filled by threads, never zero-filled.
//!
//! Zero-filling would write an output twice. So an [`Output`] is a buffer without values, of which
//! each thread writes [`Part`]s, and it becomes a `Vec` once all of it is written:
//!
//! ```text
//! Output::new(8, 4, ..)     8 slots, cut into parts of 4, and a count of 0
//! parts()                   2 parts, which may be sent to other threads
//! RowWriter::new(part)      on the thread that writes
//! write_row!(writer, 4, ..) one row, to which vectors are appended; at 4 slots it is whole
//! drop of the writer        executes a fence after non-temporal stores; the count grows by 4
//! finish()                  the count is 8: the buffer is initialized. Any other number panics
//! ```
//!
//! The proof that `finish` needs rests on three promises, each kept in one place. Only a writer can
//! add to the count, and it counts the rows that are whole. An [`OpenRow`] is only ever appended to, so
//! it is whole once it has as many values as slots. And a store writes every element that it is
//! given, by the contract of [`Element`].
//!
//! Large outputs are written past the caches, with non-temporal stores (`non_temporal.rs`).
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::non_temporal;
use super::vectors::{Lanes, Span};
use crate::device::cpu::convert::Element;
use crate::error::Error;
use pulp::Simd;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The instructions that write an output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Stores {
    Cached,
    /// Past the caches, which would evict most values before anyone reads them. Only outputs that
    /// [`may_bypass_caches`] have them.
    NonTemporal,
}

/// Whether a dtype's outputs may bypass the caches: f32 on x86-64.
///
/// Each loop that writes such an output is compiled for both kinds of stores. Where this is false,
/// an `if const` keeps the second from the compiler. f32 has the gain of a whole step that is
/// described below. In the other dtypes the compiler's time was worth more: f64 is for checks of
/// gradients, and in bf16 a forward of 32768x1024 took 2 to 4 % longer with such stores, though a
/// backward took 14 % less (`benches/results/cpu-choices.md`).
pub(super) const fn may_bypass_caches<T>() -> bool {
    cfg!(target_arch = "x86_64") && size_of::<T>() == size_of::<f32>()
}

/// Outputs of at least this many bytes get non-temporal stores. `x + residual` does not, because it
/// is read at once.
///
/// The size is from a processor with 32 MiB of L3, where f32 gained most and a bf16 forward nothing
/// (`benches/results/cpu-choices.md`). The stores stay because a whole step through candle gains
/// more than 3 % from them: at 32768x1024 in f32 it takes about 15 % less time on one thread (a
/// forward alone about 30 %). On two threads the step takes as long or up to 10 % longer
/// (`benches/results/cpu-non-temporal.md`).
const NON_TEMPORAL: usize = 16 << 20;

impl Stores {
    /// The stores for an output of `len` elements, whose groups have `group_len` each.
    ///
    /// Groups of such an output are whole cache lines. So if rows begin with a line, no line is
    /// written in both ways.
    #[inline]
    pub fn of<T>(len: usize, group_len: usize) -> Self {
        let is_large = len * size_of::<T>() >= NON_TEMPORAL;
        let has_whole_lines = (group_len * size_of::<T>()).is_multiple_of(64);
        match may_bypass_caches::<T>() && is_large && has_whole_lines {
            true => Self::NonTemporal,
            false => Self::Cached,
        }
    }
}

/// A buffer without values that becomes an output.
pub(crate) struct Output<T> {
    /// Empty, with room for `len`.
    buffer: Vec<T>,
    len: usize,
    part_len: usize,
    /// How many slots have a value.
    filled: AtomicUsize,
    stores: Stores,
}

impl<T: Element> Output<T> {
    /// A buffer for `len` elements, in parts of `part_len`; the last may be shorter.
    #[inline]
    pub fn new(len: usize, part_len: usize, stores: Stores) -> Self {
        let mut buffer = Vec::with_capacity(len);
        advise_huge_pages(buffer.spare_capacity_mut());
        Self {
            buffer,
            len,
            part_len,
            filled: AtomicUsize::new(0),
            stores,
        }
    }

    /// The parts, in order, none of them written.
    pub fn parts(&mut self) -> impl Iterator<Item = Part<'_, T>> {
        // Parts of an earlier call may have been written without a fence since.
        *self.filled.get_mut() = 0;
        let (stores, filled) = (self.stores, &self.filled);
        let slots = self.buffer.spare_capacity_mut()[..self.len].chunks_mut(self.part_len);
        slots.map(move |slots| Part {
            slots,
            filled,
            stores,
        })
    }

    /// All of it as one part, not written.
    #[inline]
    pub fn whole(&mut self) -> Part<'_, T> {
        *self.filled.get_mut() = 0;
        Part {
            slots: &mut self.buffer.spare_capacity_mut()[..self.len],
            filled: &self.filled,
            stores: self.stores,
        }
    }

    /// The output.
    ///
    /// # Panics
    ///
    /// If a part was not written whole.
    #[inline]
    pub fn finish(mut self) -> Vec<T> {
        assert_eq!(
            self.filled.into_inner(),
            self.len,
            "a pass left part of its output unwritten"
        );
        // SAFETY: the buffer has room for `len` elements. The drop of a `RowWriter` adds what it
        // wrote of its part to the count, after its fence; without that drop it adds nothing. A
        // part has one writer, which takes it, and adds at most the part's length, because the
        // slots of each row are cut from the part, after those of the row before. A writer counts
        // rows that `end` found whole: `push` has filled them from the front, and by the contract
        // of `Element` a store writes all that it is given. So by the assertion every part is
        // written whole, and the parts make up the `len` elements. The count starts over with the
        // parts, which borrow the output mutably, and whoever has joined the threads that dropped
        // the writers sees all that they added.
        unsafe { self.buffer.set_len(self.len) };
        self.buffer
    }
}

/// Outputs of at least this many bytes ask for huge pages. Many allocators take such a buffer from
/// the system each time, and a page fault for every 4 KiB then costs more than the arithmetic that
/// fills them.
///
/// Under glibc, a forward of 32 MiB has 528 page faults with huge pages and 8193 without, and a
/// forward and backward of 8 MiB 1046 and 4112. mimalloc keeps its pages, and has none either way.
#[cfg(target_os = "linux")]
const HUGE: usize = 4 << 20;

/// The environment variable that turns the advice off, for a program whose memory must not grow by
/// what it does not touch: the advice stays on memory that the allocator reuses.
const VARIABLE: &str = "CANDLE_POWERNORM_HUGE_PAGES";

/// `Some(false)` if [`VARIABLE`] turns the advice off, and `None` if its value is unknown.
static ADVISES: LazyLock<Option<bool>> =
    LazyLock::new(
        || match std::env::var_os(VARIABLE).unwrap_or_default().to_str() {
            Some("1" | "") => Some(true),
            Some("0") => Some(false),
            _ => None,
        },
    );

/// Rejects an unknown value of the switch, which would otherwise be ignored.
pub(crate) fn check_switch() -> candle::Result<()> {
    if ADVISES.is_some() {
        return Ok(());
    }
    Err(Error::Environment {
        variable: VARIABLE,
        expected: "0 or 1",
        got: std::env::var_os(VARIABLE).unwrap_or_default(),
    }
    .into())
}

/// Asks for huge pages under a large buffer, unless the switch is off.
#[cfg(target_os = "linux")]
fn advise_huge_pages<T>(buffer: &mut [MaybeUninit<T>]) {
    // 4 KiB on x86-64, and up to 64 KiB on ARM: advice on a part of a page is an error.
    static PAGE: LazyLock<Option<usize>> = LazyLock::new(|| {
        // SAFETY: `sysconf` takes any name.
        usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()
    });
    let bytes = size_of_val(buffer);
    if let (true, Some(page)) = (bytes >= HUGE && *ADVISES == Some(true), *PAGE) {
        let start = buffer.as_mut_ptr() as usize;
        let aligned = start.next_multiple_of(page);
        let len = (start + bytes - aligned) / page * page;
        // SAFETY: the range lies within the buffer, which is borrowed mutably, and the advice
        // changes no contents. If the kernel has no huge pages, the call fails without consequence.
        unsafe { libc::madvise(aligned as *mut libc::c_void, len, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages<T>(_: &mut [MaybeUninit<T>]) {}

/// A part of an output, which one thread writes.
pub(crate) struct Part<'a, T> {
    slots: &'a mut [MaybeUninit<T>],
    /// The count of the output's slots with a value.
    filled: &'a AtomicUsize,
    stores: Stores,
}

/// Writes a part from the front, row by row.
pub(crate) struct RowWriter<'a, T> {
    part: Part<'a, T>,
    filled: usize,
    /// Makes the writer `!Send`, because only a fence on the thread that wrote makes
    /// non-temporal stores visible to other threads.
    stays: PhantomData<*mut ()>,
}

impl<'a, T: Element> RowWriter<'a, T> {
    #[inline(always)]
    pub fn new(part: Part<'a, T>) -> Self {
        Self {
            part,
            filled: 0,
            stays: PhantomData,
        }
    }

    /// The stores of the part.
    #[inline(always)]
    pub fn stores(&self) -> Stores {
        self.part.stores
    }

    /// The next row, of `cols` slots. [`write_row!`] picks the stores, which are the part's.
    ///
    /// # Panics
    ///
    /// If the part has other stores, or no room for another row.
    #[inline(always)]
    pub fn row<const NON_TEMPORAL: bool>(&mut self, cols: usize) -> OpenRow<'_, T, NON_TEMPORAL> {
        let stores = self.part.stores;
        assert!(NON_TEMPORAL == (stores != Stores::Cached), "other stores");
        OpenRow {
            slots: &mut self.part.slots[self.filled..][..cols],
            len: 0,
            filled: &mut self.filled,
            stays: PhantomData,
        }
    }

    /// The last `n` values.
    ///
    /// # Panics
    ///
    /// If the stores are non-temporal, because such values may still be in transit to memory.
    #[inline(always)]
    pub fn last(&self, n: usize) -> &[T] {
        assert_eq!(self.part.stores, Stores::Cached);
        // SAFETY: all slots up to `filled` are initialized: `end` adds a row to `filled` once it is
        // whole, `push` fills it from the front, and by the contract of `Element` a store writes
        // each element that it is given. All of these stores were cached.
        unsafe { self.part.slots[self.filled - n..self.filled].assume_init_ref() }
    }
}

impl<T> Drop for RowWriter<'_, T> {
    /// Executes the fence of non-temporal stores, then counts what was written.
    ///
    /// A fence after each row would cost 85 ns, as much as a whole forward of 512 columns.
    #[inline(always)]
    fn drop(&mut self) {
        // Under Miri non-temporal stores are plain ones, which need no fence.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.part.stores == Stores::NonTemporal {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
        self.part.filled.fetch_add(self.filled, Ordering::Relaxed);
    }
}

/// A row that is written from the front.
pub(crate) struct OpenRow<'a, T, const NON_TEMPORAL: bool> {
    slots: &'a mut [MaybeUninit<T>],
    /// The number of slots with a value.
    len: usize,
    /// That of the writer, to which a whole row is added.
    filled: &'a mut usize,
    /// Makes the row `!Send`, as its writer is.
    stays: PhantomData<*mut ()>,
}

impl<T: Element, const NON_TEMPORAL: bool> OpenRow<'_, T, NON_TEMPORAL> {
    /// The number of columns that have been written.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Appends `values`, rounded to the output's dtype.
    ///
    /// # Panics
    ///
    /// If the row has no room for them.
    #[inline(always)]
    pub fn push<S: Simd, const K: usize>(&mut self, values: Lanes<S, T::Acc, K>) {
        let width = Span::<S, T::Acc, K>::WIDTH;
        let slots = &mut self.slots[self.len..][..width];
        if NON_TEMPORAL {
            // SAFETY: `RowWriter::row` makes rows with such stores only for parts with them, which
            // only x86-64 has. The writer borrows the part mutably, and `last` rejects such parts.
            // The writer and its rows stay on this thread. The drop of the writer executes a fence,
            // and without that drop the count stays too small, so that `finish` panics before anyone
            // reads. The slots of a row that is left before its end are written again, by this
            // thread, which sees its own stores in order.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                non_temporal::write(values, slots)
            };
        } else {
            values.write(slots);
        }
        self.len += width;
    }

    /// Counts the row.
    ///
    /// # Panics
    ///
    /// If part of it is unwritten.
    #[inline(always)]
    pub fn end(self) {
        // Not `assert_eq!`, which takes references, and so keeps the row out of registers.
        assert!(self.len == self.slots.len(), "part of a row is unwritten");
        *self.filled += self.len;
    }
}

/// `write_row!(T, writer, cols, |row| body)` writes the next row of a [`RowWriter`] of `T`: the body
/// appends all columns to `row`, an [`OpenRow`].
///
/// The kind of stores is tested once a row, and the body compiled for each that `T` may have: a test
/// in each block would cost a tenth of the time.
macro_rules! write_row {
    ($dtype:ty, $writer:expr, $cols:expr, |$row:ident| $body:expr) => {
        if const { !$crate::device::cpu::row::output::may_bypass_caches::<$dtype>() }
            || $writer.stores() == $crate::device::cpu::row::output::Stores::Cached
        {
            let mut $row = $writer.row::<false>($cols);
            $body;
            $row.end();
        } else {
            let mut $row = $writer.row::<true>($cols);
            $body;
            $row.end();
        }
    };
}
pub(super) use write_row;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::device::cpu::row::spans::for_spans;
    use crate::device::cpu::run::level::Level;
    use half::{bf16, f16};
    use pulp::WithSimd;

    /// The stores of a large output.
    const fn large<T>() -> Stores {
        match may_bypass_caches::<T>() {
            true => Stores::NonTemporal,
            false => Stores::Cached,
        }
    }

    /// Large outputs ask the kernel for huge pages, unless the switch is off. A process reads the
    /// switch once, so this test starts itself once more.
    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn large_outputs_ask_for_huge_pages() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return;
        }
        if std::env::var_os(VARIABLE).is_none() {
            let name = std::thread::current().name().unwrap().to_owned();
            let mut run = std::process::Command::new(std::env::current_exe().unwrap());
            run.args([&name, "--exact"]).env(VARIABLE, "0");
            let printed = run.output().unwrap().stdout;
            let printed = String::from_utf8_lossy(&printed);
            assert!(printed.contains("1 passed"), "{printed}");
        }
        let output = Output::<f32>::new(HUGE, HUGE, Stores::Cached);
        let inside = output.buffer.as_ptr() as usize + 2 * HUGE;
        // Lines of a mapping begin with its range, and end with its flags.
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_here = false;
        let flags = maps.lines().find(|line| {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            if let Some((start, end)) = range {
                let address = |text| usize::from_str_radix(text, 16).unwrap_or(0);
                is_here = (address(start)..address(end)).contains(&inside);
            }
            is_here && line.starts_with("VmFlags:")
        });
        let is_advised = flags.unwrap().split(' ').any(|flag| flag == "hg");
        assert_eq!(is_advised, *ADVISES == Some(true), "{flags:?}");
    }

    /// Writes a row as it is.
    struct WriteRow<'a, 'b, T, U>(&'a mut RowWriter<'b, U>, &'a [T]);

    impl<T: Element, U: Element<Acc = T::Acc>> WithSimd for WriteRow<'_, '_, T, U> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let Self(writer, source) = self;
            let cols = source.len();
            write_row!(U, writer, cols, |row| {
                for_spans!(simd, 4, 0..cols, row, |at| at.load(source));
            });
        }
    }

    /// The values of `source` in another dtype, as one row.
    pub fn convert<T: Element, U: Element<Acc = T::Acc>>(level: Level, source: &[T]) -> Vec<U> {
        let mut output = Output::new(source.len(), source.len(), Stores::Cached);
        for part in output.parts() {
            level.run(WriteRow(&mut RowWriter::new(part), source));
        }
        output.finish()
    }

    /// Parts of two rows, of which some are aligned for non-temporal stores and some are not.
    fn parts_make_up_the_output_in<T: Element>() {
        let len = if cfg!(miri) { 3003 } else { 30_003 };
        let source: Vec<_> = (0..len).map(|i| T::from_f64((i % 1000) as f64)).collect();
        for level in Level::all() {
            for stores in [Stores::Cached, large::<T>()] {
                let mut output = Output::<T>::new(len, 1000, stores);
                for (part, source) in output.parts().zip(source.chunks(1000)) {
                    let (first, second) = source.split_at(source.len() / 3);
                    let mut writer = RowWriter::new(part);
                    for row in [first, second] {
                        level.run(WriteRow(&mut writer, row));
                    }
                }
                assert!(output.finish() == source, "{level:?}, {stores:?}");
            }
        }
    }

    #[test]
    fn parts_make_up_the_output() {
        parts_make_up_the_output_in::<f32>();
        parts_make_up_the_output_in::<f64>();
        parts_make_up_the_output_in::<f16>();
        parts_make_up_the_output_in::<bf16>();
    }

    /// Writes `rows` rows of five to each part of an output of ten.
    fn fill_with(rows: [usize; 2], end: impl Fn(RowWriter<f32>)) -> Vec<f32> {
        let mut output = Output::new(10, 5, large::<f32>());
        for (part, rows) in output.parts().zip(rows) {
            let mut writer = RowWriter::new(part);
            for _ in 0..rows {
                Level::Baseline.run(WriteRow(&mut writer, &[1f32; 5]));
            }
            end(writer);
        }
        output.finish()
    }

    #[test]
    fn a_part_that_was_written_whole_is_output() {
        assert_eq!(fill_with([1, 1], |writer| drop(writer)), [1.; 10]);
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn a_writer_without_its_fence_is_no_output() {
        fill_with([1, 1], |writer| std::mem::forget(writer));
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn an_unfinished_part_is_no_output() {
        fill_with([1, 0], |writer| drop(writer));
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn a_row_too_many_is_no_output() {
        fill_with([1, 2], |writer| drop(writer));
    }

    #[test]
    #[should_panic(expected = "part of a row is unwritten")]
    fn a_row_that_is_not_whole_is_no_row() {
        let mut output = Output::<f32>::new(5, 5, Stores::Cached);
        for part in output.parts() {
            let mut writer = RowWriter::new(part);
            let mut row = writer.row::<false>(5);
            let three = pulp::Scalar;
            for_spans!(three, 1, 0..3, row, |at| at.splat(1.));
            row.end();
        }
    }

    /// A row that is left before its end does not count, and the next one takes its slots.
    #[test]
    fn a_row_without_an_end_does_not_count() {
        let mut output = Output::<f32>::new(2, 2, Stores::Cached);
        for part in output.parts() {
            let mut writer = RowWriter::new(part);
            writer
                .row::<false>(2)
                .push(Span::<_, f32, 1>::new(pulp::Scalar, 0).splat(1.));
            let mut row = writer.row::<false>(2);
            for_spans!(pulp::Scalar, 1, 0..2, row, |at| at.splat(3.));
            row.end();
        }
        assert_eq!(output.finish(), [3.; 2]);
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn a_row_has_no_more_than_its_slots() {
        let mut output = Output::<f32>::new(4, 4, Stores::Cached);
        for part in output.parts() {
            let mut writer = RowWriter::new(part);
            let mut row = writer.row::<false>(2);
            for_spans!(pulp::Scalar, 1, 0..3, row, |at| at.splat(1.));
        }
    }

    /// The proof of non-temporal stores rests on this.
    #[test]
    #[should_panic(expected = "other stores")]
    fn a_row_of_other_stores_is_no_row() {
        let mut output = Output::<f32>::new(2, 2, Stores::Cached);
        for part in output.parts() {
            RowWriter::new(part).row::<true>(2);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    #[should_panic(expected = "other stores")]
    fn a_cached_row_of_other_stores_is_no_row() {
        let mut output = Output::<f32>::new(2, 2, Stores::NonTemporal);
        for part in output.parts() {
            RowWriter::new(part).row::<false>(2);
        }
    }

    /// The second time no writer counts, although the slots have values.
    #[test]
    #[should_panic(expected = "unwritten")]
    fn parts_that_are_taken_again_are_unwritten() {
        let mut output = Output::<f32>::new(5, 5, Stores::Cached);
        for part in output.parts() {
            Level::Baseline.run(WriteRow(&mut RowWriter::new(part), &[1f32; 5]));
        }
        output.parts().for_each(drop);
        output.finish();
    }

    #[test]
    fn an_output_of_no_rows_has_no_parts() {
        let mut output = Output::<f32>::new(0, 5, Stores::Cached);
        assert_eq!(output.parts().count(), 0);
        assert!(output.finish().is_empty());
    }

    #[test]
    fn the_last_row_can_be_read_before_the_output_is_finished() {
        let mut output = Output::<f32>::new(6, 6, Stores::Cached);
        let mut parts = output.parts();
        let mut writer = RowWriter::new(parts.next().unwrap());
        for row in [[1f32, 2., 3.], [4., 5., 6.]] {
            Level::Baseline.run(WriteRow(&mut writer, &row));
        }
        assert_eq!(writer.last(3), [4., 5., 6.]);
        assert_eq!(writer.last(2), [5., 6.]);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    #[should_panic(expected = "Cached")]
    fn a_non_temporal_row_cannot_be_read_before_its_fence() {
        let mut output = Output::<f32>::new(3, 3, Stores::NonTemporal);
        for part in output.parts() {
            let mut writer = RowWriter::new(part);
            Level::Baseline.run(WriteRow(&mut writer, &[1f32; 3]));
            writer.last(3);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn large_outputs_of_whole_cache_lines_bypass_the_caches() {
        let large = 4 << 20; // 16 MiB of f32
        assert_eq!(Stores::of::<f32>(large, 16), Stores::NonTemporal);
        assert_eq!(Stores::of::<f32>(large, 48), Stores::NonTemporal);
        assert_eq!(Stores::of::<f32>(large - 16, 16), Stores::Cached);
        for group_len in [8, 17, 24, 257] {
            assert_eq!(Stores::of::<f32>(large, group_len), Stores::Cached);
        }
        // No loop is compiled for these.
        assert_eq!(Stores::of::<f64>(large, 16), Stores::Cached);
        assert_eq!(Stores::of::<f16>(2 * large, 32), Stores::Cached);
        assert_eq!(Stores::of::<bf16>(2 * large, 32), Stores::Cached);
    }
}
