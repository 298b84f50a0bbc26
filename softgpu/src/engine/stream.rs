//! Streams: queues of work that runs when somebody waits for it, in any order that nothing forbids.
//!
//! A submission gets a number in its stream and a clock: what its stream had waited for. Both the
//! scheduler, which must respect the clock, and the memory, which finds accesses that no clock
//! orders, go by it. Work runs on whichever host thread waits; the lock of the queues is not held
//! meanwhile.

use crate::engine::fault::Fault;
use crate::engine::launch::{Conditions, Counts};
use crate::engine::memory::{Clock, Memory, Position, Work, lock};
use std::any::Any;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The action of a piece of work.
pub type Action =
    Arc<dyn Fn(&Arc<Memory>, &Arc<Work>) -> Result<Option<Counts>, Fault> + Send + Sync>;

/// The action of a meeting.
pub type JointAction = dyn Fn(&Arc<Memory>, &[Arc<Work>]) -> Result<(), Fault> + Send + Sync;

/// Work of several streams that starts when all have come to it.
pub struct Meeting {
    pub size: usize,
    /// Given up: whoever comes does not wait.
    pub cancelled: AtomicBool,
    /// Takes each participant's work, by rank.
    pub action: Box<JointAction>,
}

#[derive(Clone)]
pub enum Step {
    Run(Action),
    /// Makes the meeting that it takes part in, and its rank, each time that it is queued.
    Meet(Arc<dyn Fn() -> (Arc<Meeting>, usize) + Send + Sync>),
}

/// Work for a stream.
#[derive(Clone)]
pub struct Submission {
    pub name: String,
    /// Blocks of a launch; 1 for other work.
    pub blocks: u32,
    /// A kernel's launch, which is counted.
    pub launch: bool,
    /// It also runs when kernels and copies are switched off.
    pub always: bool,
    pub step: Step,
}

impl Submission {
    /// A copy, or the like.
    pub fn new(
        name: &str,
        action: impl Fn(&Arc<Memory>, &Arc<Work>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            blocks: 1,
            launch: false,
            always: false,
            step: Step::Run(Arc::new(move |memory, work| {
                action(memory, work)
                    .map(|()| None)
                    .map_err(|what| fault_of(work, what))
            })),
        }
    }

    pub fn always(self) -> Self {
        Self {
            always: true,
            ..self
        }
    }
}

/// The fault of work that is no kernel.
pub fn fault_of(work: &Work, what: String) -> Fault {
    let place = format!("work {} of stream {}", work.number, work.stream);
    Fault::outside(&work.name, place, what)
}

/// Launches and their counts, by kernel.
pub type Tally = BTreeMap<String, (u64, Counts)>;

enum Due {
    Run(Action),
    Meet(Arc<Meeting>, usize),
}

struct Item {
    work: Arc<Work>,
    /// Counts submissions of all streams.
    ticket: u64,
    due: Due,
    launch: bool,
    tally: Arc<Mutex<Tally>>,
    /// Lives until the work has run.
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

/// The relation of a stream to the device's legacy stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// It is that stream.
    Legacy,
    /// Each waits for what was queued in the other.
    Blocking,
    NonBlocking,
}

struct Queue {
    device: i32,
    manner: Manner,
    items: VecDeque<Item>,
    /// Number of the work that runs.
    running: Option<u64>,
    /// Number of the last submission.
    queued: u64,
    after: Arc<Clock>,
    /// It goes when it is empty.
    destroyed: bool,
}

impl Queue {
    /// All work up to this number has ended.
    fn completed(&self) -> u64 {
        let next = self
            .running
            .or_else(|| self.items.front().map(|item| item.work.number));
        next.map_or(self.queued, |next| next - 1)
    }
}

/// A stream that holds more runs some at once.
const MOST_QUEUED: usize = 1000;

#[derive(Default)]
struct State {
    queues: BTreeMap<u32, Queue>,
    streams: u32,
    tickets: u64,
    random: u64,
    seen: Arc<Clock>,
    /// Devices whose work faulted.
    broken: HashSet<i32>,
    faults: Vec<Fault>,
    faults_expected: bool,
    /// Faults were printed that nobody expected.
    failed: bool,
}

/// All streams of the process, and what they work on.
pub struct Engine {
    pub memory: Arc<Memory>,
    /// Kernels and copies run.
    pub kernels: AtomicBool,
    seed: u64,
    perturb: bool,
    state: Mutex<State>,
    changed: Condvar,
}

thread_local! {
    static TALLY: Arc<Mutex<Tally>> = Arc::default();
}

/// The counts of this thread's submissions so far.
pub fn own_tally() -> Arc<Mutex<Tally>> {
    TALLY.try_with(Clone::clone).unwrap_or_default()
}

/// A number from the environment.
pub fn number_from(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.trim().parse().ok()
}

/// The environment switches something off.
fn is_off(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| value == "off" || value == "0")
}

/// The environment switches something on.
fn is_on(name: &str) -> bool {
    number_from(name).is_some_and(|on| on != 0)
}

/// The process's engine.
pub fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let mut memory = Memory::default();
        memory.unchecked = is_off("SOFTGPU_CHECKS");
        memory.sparse = is_on("SOFTGPU_SPARSE");
        let seed = number_from("SOFTGPU_SEED").unwrap_or(0);
        extern "C" fn at_exit() {
            engine().finish();
        }
        // SAFETY: the function takes nothing and lives as long as the process.
        unsafe { libc::atexit(at_exit) };
        Engine {
            memory: Arc::new(memory),
            kernels: AtomicBool::new(!is_off("SOFTGPU_KERNELS")),
            seed,
            perturb: is_on("SOFTGPU_PERTURB"),
            state: Mutex::new(State {
                random: seed,
                ..State::default()
            }),
            changed: Condvar::new(),
        }
    })
}

/// The device's work has faulted; the driver reports an illegal address from then on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

impl Engine {
    /// The conditions of a kernel. Each launch has its own order.
    pub fn conditions(&self, work: &Work) -> Conditions {
        let own = u64::from(work.stream) << 32 | work.number;
        Conditions {
            seed: match self.seed {
                0 => 0,
                seed => scramble(seed ^ scramble(own)).max(1),
            },
            perturb: self.perturb,
            sparse: self.memory.sparse,
            unchecked: self.memory.unchecked,
        }
    }

    pub fn new_stream(&self, device: i32, manner: Manner) -> u32 {
        let mut state = lock(&self.state);
        state.new_stream(device, manner)
    }

    /// The stream goes when its work has ended.
    pub fn destroy_stream(&self, stream: u32) {
        let mut state = lock(&self.state);
        if let Some(queue) = state.queues.get_mut(&stream) {
            queue.destroyed = true;
            state.forget_if_done(stream);
        }
    }

    /// Queues work.
    pub fn submit(&self, stream: u32, submission: Submission) -> Result<(), Broken> {
        let backlog = {
            let mut state = lock(&self.state);
            state.check(stream)?;
            self.queue(&mut state, stream, submission, &[], None);
            state
                .queues
                .get(&stream)
                .is_some_and(|queue| queue.items.len() > MOST_QUEUED)
        };
        if backlog {
            let mut half = Clock::default();
            if let Some(queue) = lock(&self.state).queues.get(&stream) {
                half.reach(stream, queue.queued - MOST_QUEUED as u64 / 2);
            }
            self.run_until(|state| state.has_reached(&half));
        }
        Ok(())
    }

    /// Queues the nodes of a graph. Those of its first branch go into `stream` itself; each other
    /// branch has a stream of its own.
    pub fn submit_graph(
        &self,
        stream: u32,
        nodes: &[Node],
        keep: &Arc<dyn Any + Send + Sync>,
    ) -> Result<(), Broken> {
        let mut state = lock(&self.state);
        state.check(stream)?;
        let mut branches = HashMap::new();
        let mut places: Vec<Position> = vec![];
        if let Some(first) = nodes.first() {
            branches.insert(first.branch, stream);
        }
        let start = state.position(stream);
        for node in nodes {
            let branch = *branches.entry(node.branch).or_insert_with(|| {
                let device = state.queues.get(&stream).map_or(0, |queue| queue.device);
                let branch = state.new_stream(device, Manner::NonBlocking);
                let clock = Arc::new(start.clone());
                if let Some(queue) = state.queues.get_mut(&branch) {
                    queue.after = clock;
                }
                branch
            });
            let after: Vec<_> = node.after.iter().map(|&other| places[other]).collect();
            let number = self.queue(
                &mut state,
                branch,
                node.submission.clone(),
                &after,
                Some(keep.clone()),
            );
            places.push(Position {
                stream: branch,
                number,
            });
        }
        let mut end = Clock::default();
        for branch in branches.into_values().filter(|&branch| branch != stream) {
            end.join(&state.position(branch));
            if let Some(queue) = state.queues.get_mut(&branch) {
                queue.destroyed = true;
            }
            state.forget_if_done(branch);
        }
        state.wait(stream, &end);
        Ok(())
    }

    fn queue(
        &self,
        state: &mut State,
        stream: u32,
        submission: Submission,
        after: &[Position],
        keep: Option<Arc<dyn Any + Send + Sync>>,
    ) -> u64 {
        state.meet_legacy(stream);
        let mut clock = Clock::default();
        for position in after.iter().filter(|position| position.stream != stream) {
            clock.reach(position.stream, position.number);
        }
        state.wait(stream, &clock);
        state.tickets += 1;
        let (ticket, seen) = (state.tickets, state.seen.clone());
        let Some(queue) = state.queues.get_mut(&stream) else {
            return 0;
        };
        queue.queued += 1;
        let Submission { name, launch, .. } = submission;
        let tally = own_tally();
        let on = self.kernels.load(Relaxed);
        if launch && !on {
            lock(&tally).entry(name).or_default().0 += 1;
            return queue.queued;
        }
        if !on && !submission.always {
            return queue.queued;
        }
        let mut work = Work::new(name, queue.device, stream, queue.queued, submission.blocks);
        work.after = queue.after.clone();
        work.seen = seen;
        let due = match submission.step {
            Step::Run(action) => Due::Run(action),
            Step::Meet(meet) => {
                let (meeting, rank) = meet();
                Due::Meet(meeting, rank)
            }
        };
        queue.items.push_back(Item {
            work: Arc::new(work),
            ticket,
            due,
            launch,
            tally,
            _keep: keep,
        });
        let number = queue.queued;
        self.changed.notify_all();
        number
    }

    /// Takes a place in a stream, for an allocation.
    pub fn take_place(&self, stream: u32) -> Result<Position, Broken> {
        let mut state = lock(&self.state);
        state.check(stream)?;
        state.meet_legacy(stream);
        let queue = state.queues.get_mut(&stream).ok_or(Broken)?;
        queue.queued += 1;
        Ok(Position {
            stream,
            number: queue.queued,
        })
    }

    /// The work that a stream's next work comes after.
    pub fn position(&self, stream: u32) -> Clock {
        let mut state = lock(&self.state);
        state.meet_legacy(stream);
        state.position(stream)
    }

    /// Has a stream's next work come after what an event recorded.
    pub fn wait(&self, stream: u32, clock: &Clock) {
        lock(&self.state).wait(stream, clock);
    }

    /// Waits on the host.
    pub fn synchronize(&self, clock: &Clock, device: i32) -> Result<(), Broken> {
        self.run_until(|state| state.has_reached(clock));
        let mut state = lock(&self.state);
        state.see(clock);
        state.check_device(device)
    }

    /// Waits for all work of a device.
    pub fn synchronize_device(&self, device: i32) -> Result<(), Broken> {
        let mut all = Clock::default();
        let state = lock(&self.state);
        for (&stream, queue) in &state.queues {
            if queue.device == device {
                all.reach(stream, queue.queued);
                all.join(&queue.after);
            }
        }
        drop(state);
        self.synchronize(&all, device)
    }

    pub fn check_device(&self, device: i32) -> Result<(), Broken> {
        lock(&self.state).check_device(device)
    }

    /// Runs work, of any stream, until something holds.
    fn run_until(&self, done: impl Fn(&State) -> bool) {
        let mut state = lock(&self.state);
        while !done(&state) {
            let ran;
            (state, ran) = self.run_one(state);
            if !ran && !done(&state) {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Picks something that can run and runs it.
    fn run_one<'a>(&'a self, mut state: MutexGuard<'a, State>) -> (MutexGuard<'a, State>, bool) {
        let Some(streams) = state.pick(self.seed) else {
            return (state, false);
        };
        let items = state.start(&streams);
        let devices: Vec<i32> = items.iter().map(|item| item.work.device).collect();
        // Ranks that meet fail together.
        let broken = (devices.iter()).any(|device| state.broken.contains(device));
        drop(state);
        let result = if broken { Ok(()) } else { self.execute(&items) };
        let mut state = lock(&self.state);
        for item in &items {
            let stream = item.work.stream;
            if let Some(queue) = state.queues.get_mut(&stream) {
                queue.running = None;
            }
            state.forget_if_done(stream);
        }
        if broken || result.is_err() {
            state.broken.extend(devices);
        }
        if let Err(fault) = result {
            if !state.faults_expected {
                eprintln!("softgpu: {fault}");
                state.failed = true;
            }
            state.faults.push(fault);
        }
        self.changed.notify_all();
        // Things that a graph kept are dropped without the lock.
        drop(state);
        drop(items);
        (lock(&self.state), true)
    }

    fn execute(&self, items: &[Item]) -> Result<(), Fault> {
        let item = &items[0];
        let run = std::panic::AssertUnwindSafe(|| match (&item.due, items) {
            (Due::Run(action), [item]) => action(&self.memory, &item.work),
            _ => self.meet(items).map(|()| None),
        });
        let counts = std::panic::catch_unwind(run)
            .unwrap_or_else(|_| Err(fault_of(&item.work, "the interpreter panicked".into())))?;
        if item.launch {
            let mut tally = lock(&item.tally);
            let (launches, all) = tally.entry(item.work.name.clone()).or_default();
            *launches += 1;
            if let Some(counts) = &counts {
                all.add(counts);
            }
        }
        Ok(())
    }

    fn meet(&self, items: &[Item]) -> Result<(), Fault> {
        let mut ranks: Vec<_> = items
            .iter()
            .filter_map(|item| match &item.due {
                Due::Meet(meeting, rank) => Some((*rank, meeting, item.work.clone())),
                Due::Run(_) => None,
            })
            .collect();
        ranks.sort_by_key(|(rank, ..)| *rank);
        match ranks.first() {
            Some((_, meeting, _)) if !meeting.cancelled.load(Relaxed) => {
                let works: Vec<_> = ranks.iter().map(|(.., work)| work.clone()).collect();
                (meeting.action)(&self.memory, &works)
            }
            _ => Ok(()),
        }
    }

    /// Wakes those who wait for a meeting that was cancelled.
    pub fn wake(&self) {
        let _state = lock(&self.state);
        self.changed.notify_all();
    }

    /// Work that faults is recorded for [`Engine::take_fault`], not printed, and the process does
    /// not fail for it.
    pub fn expect_faults(&self, expected: bool) {
        lock(&self.state).faults_expected = expected;
    }

    /// The oldest fault that nobody took. The devices work again.
    pub fn take_fault(&self) -> Option<Fault> {
        let mut state = lock(&self.state);
        state.broken.clear();
        (!state.faults.is_empty()).then(|| state.faults.remove(0))
    }

    /// Runs what nobody waited for, and fails the process if anything faulted.
    fn finish(&self) {
        let mut state = lock(&self.state);
        loop {
            let ran;
            (state, ran) = self.run_one(state);
            let running = state.queues.values().any(|queue| queue.running.is_some());
            if !ran && !running {
                break;
            }
            if !ran {
                // Another thread's work. If the process ended that thread, nobody notifies.
                let (next, timeout) = self
                    .changed
                    .wait_timeout(state, Duration::from_secs(10))
                    .unwrap_or_else(PoisonError::into_inner);
                state = next;
                if timeout.timed_out() {
                    break;
                }
            }
        }
        // Faults that were expected, and that nobody took.
        for fault in std::mem::take(&mut state.faults) {
            if state.faults_expected {
                eprintln!("softgpu: {fault}");
                state.failed = true;
            }
        }
        if state.failed {
            eprintln!("softgpu: the program's GPU work faulted");
            // SAFETY: it ends the process, whose output is unbuffered or was flushed before the
            // exit handlers.
            unsafe { libc::_exit(99) };
        }
    }
}

impl State {
    fn new_stream(&mut self, device: i32, manner: Manner) -> u32 {
        self.streams += 1;
        let queue = Queue {
            device,
            manner,
            items: VecDeque::new(),
            running: None,
            queued: 0,
            after: Arc::default(),
            destroyed: false,
        };
        self.queues.insert(self.streams, queue);
        self.streams
    }

    fn check(&self, stream: u32) -> Result<(), Broken> {
        let queue = self.queues.get(&stream).ok_or(Broken)?;
        self.check_device(queue.device)
    }

    fn check_device(&self, device: i32) -> Result<(), Broken> {
        match self.broken.contains(&device) {
            true => Err(Broken),
            false => Ok(()),
        }
    }

    fn forget_if_done(&mut self, stream: u32) {
        if let Some(queue) = self.queues.get(&stream)
            && queue.destroyed
            && queue.completed() == queue.queued
        {
            self.queues.remove(&stream);
        }
    }

    fn has_reached(&self, clock: &Clock) -> bool {
        clock.iter().all(|(stream, number)| {
            self.queues
                .get(&stream)
                .is_none_or(|queue| queue.completed() >= number)
        })
    }

    /// The host knows that all of it has ended.
    fn see(&mut self, clock: &Clock) {
        if clock
            .iter()
            .any(|(stream, number)| self.seen.get(stream) < number)
        {
            Arc::make_mut(&mut self.seen).join(clock);
        }
    }

    fn position(&self, stream: u32) -> Clock {
        let Some(queue) = self.queues.get(&stream) else {
            return Clock::default();
        };
        let mut clock = (*queue.after).clone();
        clock.reach(stream, queue.queued);
        clock
    }

    fn wait(&mut self, stream: u32, clock: &Clock) {
        let Some(queue) = self.queues.get_mut(&stream) else {
            return;
        };
        let new =
            |&(other, number): &(u32, u64)| other != stream && queue.after.get(other) < number;
        if clock.iter().any(|entry| new(&entry)) {
            Arc::make_mut(&mut queue.after).join(clock);
        }
    }

    /// The legacy stream and the blocking ones of its device wait for each other.
    fn meet_legacy(&mut self, stream: u32) {
        let Some(queue) = self.queues.get(&stream) else {
            return;
        };
        let (device, manner) = (queue.device, queue.manner);
        let others = match manner {
            Manner::NonBlocking => return,
            Manner::Legacy => Manner::Blocking,
            Manner::Blocking => Manner::Legacy,
        };
        let mut clock = Clock::default();
        for (&other, queue) in &self.queues {
            if queue.device == device && queue.manner == others && queue.queued > 0 {
                clock.reach(other, queue.queued);
            }
        }
        self.wait(stream, &clock);
    }

    /// The stream whose first work can start, or the streams that meet.
    fn pick(&mut self, seed: u64) -> Option<Vec<u32>> {
        let mut meetings: HashMap<*const Meeting, Vec<u32>> = HashMap::new();
        let mut ready = vec![];
        for (&stream, queue) in &self.queues {
            let Some(item) = queue.items.front() else {
                continue;
            };
            if queue.running.is_some() || !self.has_reached(&item.work.after) {
                continue;
            }
            match &item.due {
                Due::Meet(meeting, _) if !meeting.cancelled.load(Relaxed) => {
                    let here = meetings.entry(Arc::as_ptr(meeting)).or_default();
                    here.push(stream);
                    if here.len() == meeting.size {
                        ready.push((item.ticket, here.clone()));
                    }
                }
                _ => ready.push((item.ticket, vec![stream])),
            }
        }
        if seed == 0 {
            return ready.into_iter().min().map(|(_, streams)| streams);
        }
        self.random = scramble(self.random);
        let at = self.random as usize % ready.len().max(1);
        ready.into_iter().nth(at).map(|(_, streams)| streams)
    }

    /// Takes the first work of each stream.
    fn start(&mut self, streams: &[u32]) -> Vec<Item> {
        let start = |stream| {
            let queue = self.queues.get_mut(stream)?;
            let item = queue.items.pop_front()?;
            queue.running = Some(item.work.number);
            Some(item)
        };
        streams.iter().filter_map(start).collect()
    }
}

/// A node of a graph: what it does, which nodes before it it comes after, and its branch.
#[derive(Clone)]
pub struct Node {
    pub submission: Submission,
    pub after: Vec<usize>,
    pub branch: u32,
}

/// SplitMix64.
pub fn scramble(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
