//! Kernels written in PTX by hand, run and compared with what the PTX manual says.

mod exact;

use softgpu::engine::fault::Fault;
use softgpu::engine::grid::run;
use softgpu::engine::launch::{Conditions, Counts, Launch};
use softgpu::engine::memory::{Memory, Work};
use softgpu::isa::ptx::Module;
use std::sync::Arc;

const HEADER: &str =
    ".version 8.0\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 dynamic[];\n";

/// Device memory with these contents, and a way to read it back.
struct Buffer<T>(Vec<T>);

fn buffer<T: Copy>(contents: &[T]) -> Buffer<T> {
    Buffer(contents.to_vec())
}

impl<T: Copy> Buffer<T> {
    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn read(&self) -> Vec<T> {
        // The kernel wrote through an address, which the compiler cannot know of.
        let all = 0..self.0.len();
        // SAFETY: the vector is alive, and each index is inside of it.
        all.map(|index| unsafe { self.0.as_ptr().add(index).read_volatile() })
            .collect()
    }
}

/// A kernel whose parameters are 64-bit addresses `p0`, `p1`, ... With the usual registers, `%i` is
/// the index of the thread and `%rd0`, `%rd1`, ... are the addresses.
fn kernel(parameters: usize, shared: usize, body: &str) -> String {
    let list: Vec<String> = (0..parameters)
        .map(|index| format!(".param .u64 p{index}"))
        .collect();
    let loads: String = (0..parameters)
        .map(|index| format!("ld.param.u64 %rd{index}, [p{index}];\n"))
        .collect();
    let shared = if shared > 0 {
        format!(".shared .align 16 .b8 room[{shared}];\n")
    } else {
        String::new()
    };
    format!(
        "{HEADER}.visible .entry k({})\n{{\n{shared}.reg .pred %p<16>;\n.reg .b16 %h<32>;\n\
         .reg .b32 %r<64>;\n.reg .b64 %rd<64>;\n\
         .reg .f32 %f<32>;\n.reg .f64 %fd<32>;\n.reg .u32 %i;\n{loads}mov.u32 %i, %tid.x;\n\
         {body}\nret;\n}}\n",
        list.join(", ")
    )
}

/// A kernel with one parameter and no shared memory.
fn plain(body: &str) -> String {
    kernel(1, 0, body)
}

struct Shape {
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
}

fn shape(blocks: u32, threads: u32) -> Shape {
    Shape {
        blocks,
        threads,
        shared_bytes: 0,
    }
}

fn launch(
    text: &str,
    shape: &Shape,
    arguments: &[u64],
    conditions: Conditions,
) -> Result<Counts, Fault> {
    let module = Arc::new(Module::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}")));
    let globals = vec![0u64; module.globals().div_ceil(8)];
    let base = globals.as_ptr() as u64;
    let initial = module.initial_globals(base);
    // SAFETY: the vector has at least as many bytes as the variables.
    unsafe { std::ptr::copy_nonoverlapping(initial.as_ptr(), base as *mut u8, initial.len()) };
    let entry = module.entry("k").unwrap();
    let launch = Launch {
        entry,
        globals: base,
        grid: [shape.blocks, 1, 1],
        block: [shape.threads, 1, 1],
        shared_bytes: shape.shared_bytes,
        parameters: arguments
            .iter()
            .flat_map(|argument| argument.to_le_bytes())
            .collect(),
        module,
    };
    let mut memory = Memory::default();
    // The buffers are the host's own.
    memory.unchecked = true;
    run(
        &launch,
        &Arc::new(memory),
        &Arc::new(Work::default()),
        conditions,
    )
}

/// Blocks and warps in the order of a seed.
fn seeded(seed: u64) -> Conditions {
    Conditions {
        seed,
        ..Conditions::default()
    }
}

fn ok(text: &str, threads: u32, arguments: &[u64]) -> Counts {
    // The order of warps must not matter.
    let counts = [0, 1, 2, 3].map(|seed| {
        launch(text, &shape(1, threads), arguments, seeded(seed))
            .unwrap_or_else(|fault| panic!("{fault}\n{text}"))
    });
    counts[3].clone()
}

fn fault(text: &str, threads: u32, arguments: &[u64]) -> String {
    match launch(text, &shape(1, threads), arguments, Conditions::default()) {
        Ok(_) => panic!("no fault was found in\n{text}"),
        Err(fault) => fault.to_string(),
    }
}

fn says(message: &str, parts: &[&str]) {
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

/// nvcc writes the size of a warp as a constant of the language. (Seen: candle's softmax of f16.)
#[test]
fn the_size_of_a_warp_is_a_constant() {
    let size = buffer(&[0u32; 32]);
    let body = "mov.u32 %r0, WARP_SZ;\nmul.wide.u32 %rd1, %i, 4;\nadd.s64 %rd1, %rd0, %rd1;\n\
                add.s32 %r0, %r0, %i;\nst.global.u32 [%rd1], %r0;";
    ok(&plain(body), 32, &[size.address()]);
    assert_eq!(size.read(), (32..64).collect::<Vec<u32>>());
}

/// Cases that `exact` cannot test: registers wider than a type, numbers in the text, results that
/// the manual leaves to the machine.
#[test]
fn operands_are_wider_registers_and_numbers() {
    let minus = |value: i64| value as u64;
    let to_s16 =
        ["s8", "s32", "u32"].map(|from| format!("cvt.s16.{from} %r1, %r0; cvt.u64.u32 %rd2, %r1;"));
    for (instructions, a, want) in [
        (&*to_s16[0], 0x1234_ff80, 0xffff_ff80),
        (&to_s16[1], 0x1234_ff80, 0xffff_ff80),
        (&to_s16[2], 0x1234_ff80, 0xffff_ff80),
        ("cvt.s64.s32 %rd2, %rd1;", 1 << 31, minus(-1 << 31)),
        ("cvt.u32.u8 %r1, %r0; cvt.u64.u32 %rd2, %r1;", 0x1ff, 0xff),
        ("add.u64 %rd2, %rd1, 010; /* ; add */", 1, 9),
        ("and.b64 %rd2, %rd1, 0xfU; // ;", 0x123, 3),
        ("sub.s64 %rd2, %rd1, -2;", 1, 3),
        (
            "sub.f64 %rd2, %rd1, 0d3FF0000000000000;",
            3f64.to_bits(),
            2f64.to_bits(),
        ),
        ("add.f64 %rd2, %rd1, 0.5;", 3f64.to_bits(), 3.5f64.to_bits()),
        ("selp.b64 %rd2, 1, 2, 1;", 0, 1),
        ("div.u64 %rd2, 7, %rd1;", 0, u64::MAX),
        ("rem.u64 %rd2, 7, %rd1;", 0, 7),
        (
            "ex2.approx.ftz.f32 %f1, %r0; mov.b64 %rd2, {%f1, %r0};",
            u64::from(3f32.to_bits()),
            u64::from(3f32.to_bits()) << 32 | u64::from(8f32.to_bits()),
        ),
        (
            "ex2.approx.ftz.f32 %f1, %r0; cvt.u64.u32 %rd2, %f1;",
            u64::from((-140f32).to_bits()),
            0,
        ),
    ] {
        let data = buffer(&[a, 0]);
        let body = format!(
            "ld.global.u64 %rd1, [%rd0]; cvt.u32.u64 %r0, %rd1;\n{instructions}\n\
             st.global.u64 [%rd0+8], %rd2;"
        );
        ok(&plain(&body), 1, &[data.address()]);
        assert_eq!(data.read()[1], want, "{instructions} of {a:#x}");
    }
}

/// Each lane gives its own number times 10 and stores what it got, with the predicate in bit 16.
fn shuffled(instruction: &str) -> Vec<u32> {
    let output = buffer(&[0u32; 32]);
    let text = plain(&format!(
        "mul.lo.u32 %r1, %i, 10; {instruction} selp.u32 %r3, 65536, 0, %p1; \
             or.b32 %r2, %r2, %r3;\nmad.wide.u32 %rd1, %i, 4, %rd0; st.global.u32 [%rd1], %r2;"
    ));
    ok(&text, 32, &[output.address()]);
    output.read()
}

#[test]
fn shuffles_reach_where_they_may() {
    // The lane that each reads from; none if that is out of reach, so that it gets its own.
    let expect = |source: &dyn Fn(u32) -> Option<u32>| -> Vec<u32> {
        let got = |lane| source(lane).map_or(lane * 10, |from| (from * 10) | 1 << 16);
        (0..32).map(got).collect()
    };
    let down = shuffled("shfl.sync.down.b32 %r2|%p1, %r1, 4, 31, 0xffffffff;");
    assert_eq!(down, expect(&|lane| (lane + 4 < 32).then_some(lane + 4)));
    let up = shuffled("shfl.sync.up.b32 %r2|%p1, %r1, 3, 0, -1;");
    assert_eq!(up, expect(&|lane| lane.checked_sub(3)));
    let across = shuffled("shfl.sync.bfly.b32 %r2|%p1, %r1, 5, 31, -1;");
    assert_eq!(across, expect(&|lane| Some(lane ^ 5)));
    let index = shuffled("shfl.sync.idx.b32 %r2|%p1, %r1, 7, 31, -1;");
    assert_eq!(index, expect(&|_| Some(7)));
    // Segments of 8 lanes: the mask of segments is 0x18.
    let segments = shuffled("shfl.sync.idx.b32 %r2|%p1, %r1, 3, 0x181f, -1;");
    assert_eq!(segments, expect(&|lane| Some(lane & 24 | 3)));
    let within = shuffled("shfl.sync.down.b32 %r2|%p1, %r1, 3, 0x1807, -1;");
    assert_eq!(
        within,
        expect(&|lane| (lane % 8 + 3 < 8).then_some(lane + 3))
    );
}

#[test]
fn a_shuffle_from_a_lane_that_is_away_is_a_fault() {
    let body = "setp.ge.u32 %p1, %i, 16; @%p1 exit; shfl.sync.down.b32 %r2|%p2, %i, 1, 31, 0xffff;";
    let text = plain(body);
    let message = fault(&text, 32, &[0]);
    says(
        &message,
        &["lane 16, which does not take part", "thread [15, 0, 0]"],
    );
    let text = plain(
        "setp.ge.u32 %p1, %i, 16; @%p1 bra OUT; shfl.sync.idx.b32 %r2, %i, 0, 31, 0xff;\nOUT:",
    );
    // Lane 8 is not a member.
    assert!(fault(&text, 32, &[0]).contains("not in its own mask"));
    let text = plain(
        "setp.ge.u32 %p1, %i, 16; @%p1 bra OUT; \
         shfl.sync.idx.b32 %r2, %i, 0, 31, -1; bra END;\nOUT: bar.sync 0;\nEND:",
    );
    assert!(fault(&text, 32, &[0]).contains("a deadlock within the warp"));
}

#[test]
fn a_shuffle_waits_for_lanes_that_come_another_way() {
    // Odd lanes take a longer way to the same exchange, and each adds what its neighbour has.
    let output = buffer(&[0u32; 32]);
    let body = "and.b32 %r1, %i, 1; setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, %i;\n@%p1 bra EVEN;\n\
                mov.u32 %r5, 0;\n\
                LOOP: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, %i; @%p2 bra LOOP;\n\
                shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1; bra JOIN;\n\
                EVEN: shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;\n\
                JOIN: mad.wide.u32 %rd1, %i, 4, %rd0; \
                st.global.u32 [%rd1], %r3;";
    ok(&plain(body), 32, &[output.address()]);
    let want: Vec<u32> = (0..32).map(|lane| lane ^ 1).collect();
    assert_eq!(output.read(), want);
}

#[test]
fn lanes_leave_loops_at_their_own_time() {
    // Lane i sums j * k for j < i, k < j; every third lane leaves early.
    let output = buffer(&[77u32; 64]);
    let body = "mov.u32 %r1, 0; mov.u32 %r2, 0; rem.u32 %r9, %i, 3; setp.eq.u32 %p9, %r9, 2; \
                @%p9 exit;\n\
                OUTER: setp.ge.u32 %p1, %r2, %i; @%p1 bra END; mov.u32 %r3, 0;\n\
                INNER: setp.ge.u32 %p2, %r3, %r2; @%p2 bra NEXT; mad.lo.u32 %r1, %r2, %r3, %r1; \
                add.u32 %r3, %r3, 1; bra INNER;\n\
                NEXT: add.u32 %r2, %r2, 1; bra OUTER;\nEND: mad.wide.u32 %rd1, %i, 4, %rd0; \
                st.global.u32 [%rd1], %r1;";
    ok(&plain(body), 64, &[output.address()]);
    for (lane, got) in output.read().into_iter().enumerate() {
        let sum: usize = (0..lane).flat_map(|j| (0..j).map(move |k| j * k)).sum();
        let want = if lane % 3 == 2 { 77 } else { sum };
        assert_eq!(got as usize, want, "lane {lane}");
    }
}

#[test]
fn a_loop_with_a_shuffle_ends_though_lanes_leave_it() {
    // Each lane runs i + 1 times; those that are left exchange with a mask of themselves.
    let output = buffer(&[0u32; 32]);
    let body = "mov.u32 %r1, 0; mov.u32 %r4, 0;\nLOOP: shl.b32 %r2, -1, %r1; \
                shfl.sync.idx.b32 %r3, %r1, 31, 31, %r2; add.u32 %r4, %r4, %r3;\n\
                add.u32 %r1, %r1, 1; setp.le.u32 %p1, %r1, %i; @%p1 bra LOOP;\n\
                mad.wide.u32 %rd1, %i, 4, %rd0; st.global.u32 [%rd1], %r4;";
    ok(&plain(body), 32, &[output.address()]);
    let want: Vec<u32> = (0..32).map(|lane| lane * (lane + 1) / 2).collect();
    assert_eq!(output.read(), want);
}

#[test]
fn each_lane_has_local_memory_of_its_own() {
    let output = buffer(&[0u32; 32]);
    let body = ".local .align 4 .b8 own[8]; mov.u64 %rd2, own; st.local.u32 [%rd2+4], %i; \
                ld.local.u32 %r1, [own+4]; mad.wide.u32 %rd1, %i, 4, %rd0; \
                st.global.u32 [%rd1], %r1;";
    ok(&plain(body), 32, &[output.address()]);
    assert_eq!(output.read(), (0..32).collect::<Vec<u32>>());
    let beyond = body.replace("[own+4]", "[own+8]");
    let message = fault(&plain(&beyond), 32, &[output.address()]);
    assert!(message.contains("out of bounds"), "{message}");
}

#[test]
fn an_assertion_and_an_unknown_instruction_are_faults_where_they_run() {
    let declared = ".extern .func __assertfail(.param .b64 a);\n";
    let text = plain(
        "setp.lt.u32 %p1, %i, 40; @%p1 bra OK;\n{ .param .b64 a; \
         st.param.b64 [a], 0; call.uni __assertfail, (a); }\nOK:",
    );
    let text = text.replace(".visible", &format!("{declared}.visible"));
    ok(&text, 32, &[0]);
    let message = fault(&text, 64, &[0]);
    says(
        &message,
        &["an assertion of the kernel failed", "thread [40, 0, 0]"],
    );
    let text = "setp.gt.u32 %p1, %i, 40; @%p1 frobnicate.b32 %r1, %r2;";
    let text = plain(text);
    let unknown = Module::parse(&text).unwrap().unknown(0);
    assert_eq!(
        unknown,
        ["line 16: @%p1 frobnicate.b32 %r1, %r2 is unknown"]
    );
    ok(&text, 32, &[0]);
    let message = fault(&text, 64, &[0]);
    says(
        &message,
        &["does not know the instruction frobnicate.b32", "(line "],
    );
}

const REDUCE: &str = "mov.u32 %r9, room; mad.lo.u32 %r1, %i, 4, %r9; st.shared.u32 [%r1], %i;\nbar.sync 0;\n\
     xor.b32 %r2, %i, 32; mad.lo.u32 %r3, %r2, 4, %r9; ld.shared.u32 %r4, [%r3];\n\
     mad.wide.u32 %rd1, %i, 4, %rd0; st.global.u32 [%rd1], %r4;";

#[test]
fn a_barrier_makes_an_exchange_right_and_its_absence_is_found() {
    let output = buffer(&[0u32; 64]);
    let text = kernel(1, 256, REDUCE);
    let counts = ok(&text, 64, &[output.address()]);
    assert_eq!(
        output.read(),
        (0..64).map(|lane| lane ^ 32).collect::<Vec<u32>>()
    );
    assert_eq!(counts.barriers, 2);
    let without = text.replacen("bar.sync 0;", "", 1);
    for seed in 0..4 {
        let result = launch(&without, &shape(1, 64), &[output.address()], seeded(seed));
        let message = result.unwrap_err().to_string();
        assert!(
            message.contains("never written") || message.contains("a race"),
            "{message}"
        );
    }
}

#[test]
fn lanes_of_a_warp_race_too() {
    let ok = |body: &str| ok(&kernel(1, 128, body), 32, &[0]);
    let fault = |body: &str| fault(&kernel(1, 128, body), 32, &[0]);
    // The neighbour's word, without and with something that orders the lanes.
    let body = |between: &str| {
        format!(
            "mov.u32 %r9, room; mad.lo.u32 %r1, %i, 4, %r9; st.shared.u32 [%r1], %i;\n\
             {between}\nxor.b32 %r2, %i, 1; mad.lo.u32 %r3, %r2, 4, %r9; ld.shared.u32 %r4, [%r3];"
        )
    };
    says(&fault(&body("")), &["a race: lane 1 of warp 0 wrote"]);
    for legal in ["bar.warp.sync -1;", "bar.sync 0;"] {
        ok(&body(legal));
    }
    // Lanes wait for each other here too, but CUDA promises no order of memory.
    let exchange = "shfl.sync.idx.b32 %r5, %i, 0, 31, -1;";
    says(&fault(&body(exchange)), &["a race: lane 1"]);
    // Lanes are ordered all together or not at all.
    let pairs = "and.b32 %r6, %i, 30; shl.b32 %r7, 3, %r6; bar.warp.sync %r7;";
    says(
        &fault(&body(pairs)),
        &["no barrier of the lanes 0x00000003"],
    );
    // A lane may read again what it wrote itself.
    ok(
        "mov.u32 %r9, room; mad.lo.u32 %r1, %i, 4, %r9; st.shared.u32 [%r1], %i; \
        ld.shared.u32 %r2, [%r1]; st.shared.u32 [%r1], %r2;",
    );
    // All may read one word; then one may not write it.
    let message = fault(
        "mov.u32 %r9, room; setp.eq.u32 %p1, %i, 0; \
         @%p1 st.shared.u32 [%r9], 1; bar.sync 0; ld.shared.u32 %r1, [%r9]; \
         @%p1 st.shared.u32 [%r9], 2;",
    );
    says(&message, &["a race: warp 0 read"]);
    let message = fault("mov.u32 %r9, room; st.shared.u32 [%r9], %i;");
    says(&message, &["store different values"]);
    ok("mov.u32 %r9, room; st.shared.u32 [%r9], 5;");
}

#[test]
fn without_checks_no_race_is_reported() {
    let body = "mov.u32 %r9, room; st.shared.u32 [%r9], %i; ld.shared.u32 %r1, [%r9+4]; \
                cp.async.ca.shared.global [%r9+16], [%rd0], 16; ld.shared.u32 %r1, [%r9+16];";
    let input = buffer(&[0u32; 4]);
    let text = kernel(1, 128, body);
    let unchecked = Conditions {
        unchecked: true,
        ..Conditions::default()
    };
    launch(&text, &shape(1, 64), &[input.address()], unchecked).unwrap();
    assert!(fault(&text, 64, &[input.address()]).contains("store different values"));
}

#[test]
fn a_race_of_equal_writes_is_a_class_of_its_own() {
    for (value, same) in [("5", true), ("%i", false)] {
        let body = format!("mov.u32 %r9, room; st.shared.u32 [%r9], {value};");
        // A lane of each warp, so that no two are of one instruction.
        let body = format!("and.b32 %r1, %i, 31; setp.ne.u32 %p1, %r1, 0; @%p1 exit;\n{body}");
        let message = fault(&kernel(1, 128, &body), 64, &[0]);
        says(&message, &["a race: lane 0 of warp 0 wrote"]);
        assert_eq!(
            message.contains("both write the same value"),
            same,
            "{message}"
        );
    }
}

#[test]
fn shared_memory_has_ends_alignment_and_unwritten_bytes() {
    for (body, what) in [
        (
            "mov.u32 %r9, room; ld.shared.u32 %r1, [%r9];",
            "never written",
        ),
        (
            "mov.u32 %r9, room; setp.eq.u32 %p1, %i, 0; @%p1 st.shared.u16 [%r9], 1; bar.sync 0; \
             ld.shared.u32 %r1, [%r9];",
            "never written",
        ),
        (
            "mov.u32 %r9, room; st.shared.u32 [%r9+128], 1;",
            "out of bounds",
        ),
        ("mov.u32 %r9, room; st.shared.u32 [%r9+2], 1;", "misaligned"),
        (
            "mov.u32 %r9, room; st.shared.v4.u32 [%r9+8], {1, 1, 1, 1};",
            "misaligned",
        ),
        (
            "mov.u32 %r9, dynamic; st.shared.u32 [%r9+12], 1; \
             st.shared.u32 [%r9+16], 1;",
            "out of bounds",
        ),
    ] {
        let text = kernel(1, 128, body);
        let shape = Shape {
            blocks: 1,
            threads: 32,
            shared_bytes: if body.contains("dynamic") { 16 } else { 0 },
        };
        let message = launch(&text, &shape, &[0], Conditions::default())
            .unwrap_err()
            .to_string();
        assert!(message.contains(what), "{message}");
    }
}

#[test]
fn bytes_of_a_word_may_have_different_writers() {
    let output = buffer(&[0u32; 8]);
    let body = "mov.u32 %r9, room; add.u32 %r1, %r9, %i; st.shared.u8 [%r1], %i; \
                bar.warp.sync -1;\n\
                setp.ge.u32 %p1, %i, 8; @%p1 exit; mad.lo.u32 %r2, %i, 4, %r9; \
                ld.shared.u32 %r3, [%r2]; \
                mad.wide.u32 %rd1, %i, 4, %rd0; st.global.u32 [%rd1], %r3;";
    ok(&kernel(1, 32, body), 32, &[output.address()]);
    assert_eq!(output.read()[1], 0x0706_0504);
}

#[test]
fn lanes_change_their_own_parts_of_a_word() {
    for (ty, bytes) in [("u8", 1), ("u16", 2)] {
        // Each thread adds to its own element, then reads another's behind `between`.
        let body = |between: &str| {
            format!(
                "mov.u32 %r9, room; mad.lo.u32 %r1, %i, {bytes}, %r9; cvt.u16.u32 %h1, %i;\n\
                 st.shared.{ty} [%r1], %h1; ld.shared.{ty} %h2, [%r1]; add.u16 %h2, %h2, 100; \
                 st.shared.{ty} [%r1], %h2;\n\
                 {between}\n\
                 ld.shared.{ty} %h3, [%r1]; cvt.u32.u16 %r3, %h3; mad.wide.u32 %rd1, %i, 4, %rd0; \
                 st.global.u32 [%rd1], %r3;"
            )
        };
        let output = buffer(&[0u32; 64]);
        let text = kernel(1, 64 * bytes, &body(""));
        // Later blocks do not see how earlier ones used a word.
        for threads in [2, 64] {
            let blocks = shape(3, threads);
            launch(&text, &blocks, &[output.address()], Conditions::default()).unwrap();
        }
        assert_eq!(output.read(), (100..164).collect::<Vec<u32>>(), "{ty}");
        let other = format!("xor.b32 %r1, %i, 1; mad.lo.u32 %r1, %r1, {bytes}, %r9;");
        let text = kernel(1, 64 * bytes, &body(&other));
        let message = fault(&text, 2, &[output.address()]);
        says(&message, &["a race: lane 1 of warp 0 wrote"]);
        let text = kernel(1, 64 * bytes, &body(&format!("bar.warp.sync 3; {other}")));
        ok(&text, 2, &[output.address()]);
        assert_eq!(output.read()[..2], [101, 100], "{ty}");
    }
}

#[test]
fn races_are_found_in_rows_and_in_words_for_all() {
    let run = |threads: u32, body: &str| {
        let text = kernel(1, 2048, &format!("mov.u32 %r9, room; {body}"));
        launch(&text, &shape(1, threads), &[0], Conditions::default()).map_err(|f| f.to_string())
    };
    for (ty, bytes, value) in [
        ("u32", 4, "%r2"),
        ("u64", 8, "%rd5"),
        ("v2.u32", 8, "{%r2, %r3}"),
    ] {
        let write = format!("mad.lo.u32 %r1, %i, {bytes}, %r9; st.shared.{ty} [%r1], {value};");
        let shifted =
            format!("setp.lt.u32 %p1, %i, 31; @%p1 ld.shared.{ty} {value}, [%r1+{bytes}];");
        let same = format!("ld.shared.{ty} {value}, [%r9];");
        let first = format!("setp.eq.u32 %p1, %i, 0; @%p1 st.shared.{ty} [%r9], {value};");
        let wait = "bar.warp.sync -1;";
        for read in [&shifted, &same] {
            let message = run(32, &format!("{write} {read}")).unwrap_err();
            assert!(message.contains("a race: lane"), "{message}");
            run(32, &format!("{write} {wait} {read}")).unwrap();
            let message = run(32, read.replace("%r1", "%r9").as_str()).unwrap_err();
            assert!(message.contains("never written"), "{message}");
        }
        // Two warps need a barrier of the block.
        let message = run(64, &format!("{write} {wait} {same}")).unwrap_err();
        assert!(message.contains("a race: lane"), "{message}");
        run(64, &format!("{write} bar.sync 0; {same}")).unwrap();
        // A write after all lanes read, with and without a wait.
        let message = run(32, &format!("{write} {wait} {same} {first}")).unwrap_err();
        assert!(message.contains("a race: warp 0 read"), "{message}");
        run(32, &format!("{write} {wait} {same} {wait} {first}")).unwrap();
        // The end of the memory is not passed by any lane.
        let far = format!(
            "mad.lo.u32 %r1, %i, {bytes}, %r9; st.shared.{ty} [%r1+{}], {value};",
            2048 - 4 * bytes
        );
        let message = run(32, &far).unwrap_err();
        says(&message, &["thread [4, 0, 0]", "out of bounds"]);
    }
}

#[test]
fn a_load_gives_the_same_whichever_lanes_take_part() {
    let bytes: Vec<u8> = (0..128).map(|byte| (byte * 37 + 101) as u8).collect();
    let input = buffer(&bytes);
    for (ty, size) in [("u8", 1), ("s8", 1), ("u16", 2), ("s16", 2), ("u32", 4)] {
        let output = buffer(&[0u32; 128]);
        let body = format!(
            "mad.wide.u32 %rd2, %i, {size}, %rd0; mad.wide.u32 %rd3, %i, 16, %rd1; \
             rem.u32 %r9, %i, 3; setp.eq.u32 %p1, %r9, 0;\n\
             sub.u32 %r9, %i, 5; setp.lt.u32 %p2, %r9, 15; mov.u32 %r2, 7; mov.u32 %r3, 7; \
             mov.u32 %r4, 7;\n\
             ld.global.{ty} %r1, [%rd2]; @%p1 ld.global.{ty} %r2, [%rd2]; \
             @%p2 ld.global.{ty} %r3, [%rd2]; @%p1 ld.global.{ty} %r4, [%rd0+{size}];\n\
             st.global.v4.u32 [%rd3], {{%r1, %r2, %r3, %r4}};"
        );
        let text = kernel(2, 0, &body);
        ok(&text, 32, &[input.address(), output.address()]);
        let element = |index: usize| {
            let bytes = &bytes[index * size..];
            match ty {
                "u8" => u32::from(bytes[0]),
                "s8" => bytes[0] as i8 as u32,
                "u16" => u32::from(u16::from_le_bytes([bytes[0], bytes[1]])),
                "s16" => i16::from_le_bytes([bytes[0], bytes[1]]) as u32,
                _ => u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            }
        };
        for (lane, values) in output.read().chunks(4).enumerate() {
            let if_active = |active: bool, index| if active { element(index) } else { 7 };
            let (third, middle) = (lane % 3 == 0, (5..20).contains(&lane));
            let expected = [
                element(lane),
                if_active(third, lane),
                if_active(middle, lane),
                if_active(third, 1),
            ];
            assert_eq!(values, expected, "{ty}, lane {lane}");
        }
    }
}

#[test]
fn barriers_that_cannot_complete_are_faults() {
    // Half of a warp waits, the other waits elsewhere.
    let two = "setp.lt.u32 %p1, %i, 16; @%p1 bra A; bar.sync 1; bra END;\nA: bar.sync 0;\nEND:";
    let text = plain(two);
    assert!(fault(&text, 32, &[0]).contains("has diverged"));
    // A part of a warp passes the barrier by and exits. To exit instead of it is allowed.
    let text = "setp.ge.u32 %p1, %i, 16; @%p1 bar.sync 0; st.global.u32 [%rd0], 1; ret;";
    let text = plain(text);
    assert!(fault(&text, 32, &[buffer(&[0]).address()]).contains("bypassed the barrier"));
    let early = "setp.ge.u32 %p1, %i, 16; @%p1 bra A; bar.sync 0; ret;\nA: mov.u32 %r1, 0;";
    ok(&plain(early), 32, &[0]);
    ok(&plain(&early.replace("mov.u32 %r1, 0", "ret")), 32, &[0]);
    // Two warps wait at two barriers.
    let text = plain(&two.replace("16", "32"));
    let message = fault(&text, 64, &[0]);
    says(&message, &["cannot complete", "warp 1 at barrier 1"]);
    // Threads that exited are not waited for; threads that are counted on are.
    let text = plain("setp.lt.u32 %p1, %i, 40; @%p1 exit; bar.sync 0;");
    ok(&text, 128, &[0]);
    let text = plain("setp.lt.u32 %p1, %i, 64; @%p1 exit; bar.sync 1, 128;");
    assert!(fault(&text, 128, &[0]).contains("cannot complete"));
    let text = "setp.lt.u32 %p1, %i, 64; @%p1 bra END; bar.sync 1, 64;\nEND:";
    ok(&plain(text), 128, &[0]);
}

/// Threads of rows of 64: `%r1` is the thread's own word, `%r3` its row's barrier.
const ROWS: &str = "mov.u32 %r9, room; mad.lo.u32 %r1, %i, 4, %r9; shr.u32 %r3, %i, 6; \
                    add.u32 %r3, %r3, 1;\n";

/// The fault of two rows, which must be there in each order of the warps or in none.
fn faults_of_rows(body: &str) -> Option<String> {
    let text = kernel(1, 2048, &format!("{ROWS}{body}"));
    let faults = [0, 1, 2, 3].map(|seed| {
        let result = launch(&text, &shape(2, 128), &[0], seeded(seed));
        result.err().map(|fault| fault.to_string())
    });
    assert!(
        faults
            .iter()
            .all(|fault| fault.is_some() == faults[0].is_some()),
        "{faults:?}"
    );
    faults.into_iter().next().flatten()
}

#[test]
fn a_barrier_of_a_row_orders_nothing_in_another_row() {
    let exchange = |distance: u32| {
        format!(
            "st.shared.u32 [%r1], %i; bar.sync 0; ld.shared.u32 %r2, [%r1];\n\
             st.shared.u32 [%r1], %i; bar.sync %r3, 64;\n\
             xor.b32 %r4, %i, {distance}; mad.lo.u32 %r5, %r4, 4, %r9;\n\
             ld.shared.u32 %r6, [%r5];"
        )
    };
    assert_eq!(faults_of_rows(&exchange(32)), None);
    let message = faults_of_rows(&exchange(64)).unwrap();
    says(
        &message,
        &["a race: lane 0 of warp 2 wrote", "thread [0, 0, 0]"],
    );
    // A row that writes what the other has read.
    let overwrite = |distance: u32| {
        exchange(32)
            + &format!(
                "bar.sync %r3, 64; xor.b32 %r4, %i, {distance}; mad.lo.u32 %r5, %r4, 4, %r9;\n\
             st.shared.u32 [%r5], %i;"
            )
    };
    assert_eq!(faults_of_rows(&overwrite(32)), None);
    says(&faults_of_rows(&overwrite(64)).unwrap(), &["a race: "]);
    // A barrier that counts all threads of the block.
    let counted = exchange(64).replace("bar.sync %r3, 64", "bar.sync 3, 128");
    assert_eq!(faults_of_rows(&counted), None);
}

#[test]
fn rows_exchange_through_two_buffers() {
    // Buffers of 512 bytes, used alternately: a warp may begin the next exchange while the other
    // still reads.
    let body = |mask: u32| {
        format!(
            "mov.u32 %r10, 0;\n\
             LOOP: and.b32 %r11, %r10, {mask}; mad.lo.u32 %r12, %r11, 512, %r1;\n\
             xor.b32 %r13, %i, 32; mad.lo.u32 %r13, %r13, 4, %r9;\n\
             mad.lo.u32 %r13, %r11, 512, %r13;\n\
             st.shared.u32 [%r12], %i; bar.sync %r3, 64; ld.shared.u32 %r14, [%r13];\n\
             add.u32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, 6; @%p1 bra LOOP;"
        )
    };
    assert_eq!(faults_of_rows(&body(1)), None);
    says(&faults_of_rows(&body(0)).unwrap(), &["a race: "]);
}

/// Runs warps, of each of which one lane takes steps: `w` writes the one word and `r` reads it, `b`
/// writes a byte of it. A number is a barrier, where the warp waits for one other, or at 0 for all.
/// Gives the fault, which must be there in each order of the warps or in none.
fn fault_of_warps(warps: &[&str]) -> Option<String> {
    let mut body = "mov.u32 %r9, room; shr.u32 %r1, %i, 5; and.b32 %r2, %i, 31; \
                    setp.eq.u32 %p2, %r2, 0;\n"
        .to_string();
    for (number, steps) in warps.iter().enumerate() {
        body += &format!("setp.ne.u32 %p1, %r1, {number}; @%p1 bra NEXT{number};\n");
        for step in steps.split_whitespace() {
            body += &match step {
                "w" => "@%p2 st.shared.u32 [%r9], 1;\n".to_string(),
                "b" => "@%p2 st.shared.u8 [%r9+1], 1;\n".to_string(),
                "r" => "@%p2 ld.shared.u32 %r3, [%r9];\n".to_string(),
                "0" => "bar.sync 0;\n".to_string(),
                barrier => format!("bar.sync {barrier}, 64;\n"),
            };
        }
        body += &format!("exit;\nNEXT{number}:\n");
    }
    let text = kernel(1, 128, &body);
    let threads = 32 * warps.len() as u32;
    let faults = [0, 1, 2, 3].map(|seed| {
        let result = launch(&text, &shape(2, threads), &[0], seeded(seed));
        result.err().map(|fault| fault.to_string())
    });
    let found = |fault: &Option<String>| fault.is_some();
    assert!(
        faults.iter().all(|fault| found(fault) == found(&faults[0])),
        "{faults:?}"
    );
    faults.into_iter().next().flatten()
}

#[test]
fn barriers_order_the_warps_that_meet() {
    for barrier in 1..16 {
        let id = barrier.to_string();
        let (writes, reads) = (format!("w {id}"), format!("{id} r"));
        assert_eq!(fault_of_warps(&[&writes, &reads, ""]), None);
    }
    let message = fault_of_warps(&["w 16", "16 r"]).unwrap();
    says(&message, &["there is no barrier 16"]);
    // By way of a third warp, and only where it comes later.
    assert_eq!(fault_of_warps(&["w 1", "1 2", "2 r"]), None);
    assert!(fault_of_warps(&["w 1", "2 1", "2 r"]).is_some());
    // A thread that has exited orders nothing, unless all threads of the block wait.
    assert!(fault_of_warps(&["w", "5 r", "5"]).is_some());
    assert_eq!(fault_of_warps(&["w", "0 r", "0"]), None);
    // Three warps at a barrier of two: the third waits for a fourth.
    assert!(
        fault_of_warps(&["1", "1", "1"])
            .unwrap()
            .contains("cannot complete")
    );
    assert_eq!(fault_of_warps(&["1", "1", "1", "1"]), None);
}

#[test]
fn a_write_waits_for_each_reader() {
    // Warps 1 and 2 read what warp 0 writes, and each has barriers of its own with it.
    assert_eq!(fault_of_warps(&["w 1 2 3 4 w", "1 r 3", "2 r 4"]), None);
    assert_eq!(fault_of_warps(&["w 1 2 4 3 w", "1 r 3", "2 r 4"]), None);
    for early in ["w 1 2 3 w 4", "w 1 2 4 w 3"] {
        let message = fault_of_warps(&[early, "1 r 3", "2 r 4"]).unwrap();
        says(&message, &["a race: "]);
    }
    // A barrier of all orders reads at different clocks, and the bytes of a word apart.
    assert_eq!(fault_of_warps(&["w 1 2 0 w", "1 r 0", "2 r 0"]), None);
    assert_eq!(fault_of_warps(&["w 1 2 3 4 b", "1 r 3", "2 r 4"]), None);
    assert!(fault_of_warps(&["w 1 2 3 b 4", "1 r 3", "2 r 4"]).is_some());
    // Warp 1 reads before warp 2 does, so a write after the read of warp 2 needs no other barrier.
    assert_eq!(fault_of_warps(&["w 0 3 w", "0 r 1", "0 1 r 3"]), None);
}

#[test]
fn vectors_and_narrow_loads_fill_their_registers() {
    let data = buffer(&[0x8001_7fffu32, 0xffff_fffe, 3, 4, 0, 0, 0, 0]);
    let body = "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0]; add.u32 %r3, %r3, %r4; \
                st.global.v2.u32 [%rd0+16], {%r3, %r1};\n\
                ld.global.s16 %r5, [%rd0+2]; st.global.u32 [%rd0+24], %r5; \
                ld.global.s8 %h1, [%rd0+4]; \
                cvt.s32.s16 %r6, %h1; st.global.u32 [%rd0+28], %r6;";
    ok(&plain(body), 1, &[data.address()]);
    assert_eq!(data.read()[4..], [7, 0x8001_7fff, 0xffff_8001, 0xffff_fffe]);
}

const COPY: &str = "mov.u32 %r9, room; mad.lo.u32 %r1, %i, 16, %r9; \
                    mad.wide.u32 %rd2, %i, 16, %rd0;\n\
                    cp.async.ca.shared.global [%r1], [%rd2], 16;\ncp.async.commit_group;\n\
                    cp.async.wait_group 0;\n\
                    ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1]; mad.wide.u32 %rd3, %i, 16, %rd1; \
                    st.global.v4.u32 [%rd3], {%r5, %r4, %r3, %r2};";

#[test]
fn copies_land_when_somebody_waits() {
    let from = buffer(&(0..128).collect::<Vec<u32>>());
    let to = buffer(&[0u32; 128]);
    let text = kernel(2, 512, COPY);
    let arguments = [from.address(), to.address()];
    ok(&text, 32, &arguments);
    assert_eq!(to.read()[..4], [3, 2, 1, 0]);
    let without = text.replacen("cp.async.wait_group 0;", "", 1);
    assert!(fault(&without, 32, &arguments).contains("still in flight"));
    // A group that is not committed is not waited for.
    let without = text.replacen("cp.async.commit_group;", "", 1);
    assert!(fault(&without, 32, &arguments).contains("still in flight"));
    ok(&without.replace("wait_group 0", "wait_all"), 32, &arguments);
    let overwritten = text.replace(
        "cp.async.commit_group;",
        "cp.async.commit_group; st.shared.u32 [%r1], 1;",
    );
    assert!(fault(&overwritten, 32, &arguments).contains("still in flight"));
    // The latest group may be left in flight: two stages, one waited for.
    let stages = COPY.replace(
        "cp.async.wait_group 0;",
        "cp.async.ca.shared.global [%r1+512], [%rd2], 8, 4; cp.async.commit_group; \
         cp.async.wait_group 1;",
    );
    ok(&kernel(2, 1024, &stages), 32, &arguments);
    let early = stages.replace("[%r1];", "[%r1+512];");
    assert!(fault(&kernel(2, 1024, &early), 32, &arguments).contains("still in flight"));
    let zeros = stages.replace("wait_group 1", "wait_group 0").replace(
        "ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1];",
        "ld.shared.v2.u32 {%r2, %r3}, [%r1+512]; mov.u32 %r4, 9; mov.u32 %r5, 9;",
    );
    ok(&kernel(2, 1024, &zeros), 32, &arguments);
    assert_eq!(to.read()[4..8], [9, 9, 0, 4]);
    // Another lane may read a copy only behind something that orders the two.
    let neighbour = COPY.replace(
        "ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1];",
        "xor.b32 %r6, %r1, 16; ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r6];",
    );
    assert!(fault(&kernel(2, 512, &neighbour), 32, &arguments).contains("a race"));
    ok(
        &kernel(2, 512, &neighbour.replace("xor", "bar.sync 0; xor")),
        32,
        &arguments,
    );
}

#[test]
fn conflicts_and_sectors_are_counted() {
    let data = buffer(&[0u32; 32 * 32]);
    let count = |body: &str| {
        let text = kernel(1, 8192, &format!("mov.u32 %r9, room; {body}"));
        launch(
            &text,
            &shape(1, 32),
            &[data.address() & !31],
            Conditions::default(),
        )
        .unwrap()
    };
    for (place, store, conflicts) in [
        ("mad.lo.u32 %r1, %i, 4, %r9;", "u32 [%r1], 1", 0),
        ("mad.lo.u32 %r1, %i, 8, %r9;", "u32 [%r1], 1", 1),
        ("mad.lo.u32 %r1, %i, 128, %r9;", "u32 [%r1], 1", 31),
        ("mad.lo.u32 %r1, %i, 8, %r9;", "v2.u32 [%r1], {1, 1}", 0),
        ("mad.lo.u32 %r1, %i, 16, %r9;", "v2.u32 [%r1], {1, 1}", 2),
        (
            "mad.lo.u32 %r1, %i, 16, %r9;",
            "v4.u32 [%r1], {1, 1, 1, 1}",
            0,
        ),
        // Each word for 16 lanes.
        (
            "shr.u32 %r2, %i, 4; mad.lo.u32 %r1, %r2, 128, %r9;",
            "u32 [%r1], 1",
            1,
        ),
    ] {
        let counts = count(&format!("{place} st.shared.{store};"));
        assert_eq!(counts.bank_conflicts, conflicts, "{place} {store}");
    }
    let aligned =
        count("mad.wide.u32 %rd1, %i, 4, %rd0; add.u64 %rd1, %rd1, 32; ld.global.u32 %r1, [%rd1];");
    assert_eq!((aligned.sectors_loaded, aligned.bytes_loaded), (4, 128));
    assert_eq!(
        count(
            "mad.wide.u32 %rd1, %i, 64, %rd0; add.u64 %rd1, %rd1, 32; ld.global.u32 %r1, [%rd1];"
        )
        .sectors_loaded,
        32
    );
}

#[test]
fn perturbed_results_stay_within_their_error() {
    let inputs: Vec<f32> = (1..400).map(|index| index as f32 * 0.37).collect();
    let input = buffer(&inputs);
    let output = buffer(&vec![0f32; inputs.len()]);
    for (instruction, truth, bound) in [
        (
            "rsqrt.approx.f32",
            (|x| 1.0 / x.sqrt()) as fn(f64) -> f64,
            2f64.powf(-22.9) + 2f64.powi(-24),
        ),
        ("rcp.approx.ftz.f32", |x| 1.0 / x, 2f64.powi(-23)),
        ("ex2.approx.ftz.f32", |x| (x / 8.0).exp2(), 2f64.powi(-22)),
        ("sqrt.approx.f32", |x| x.sqrt(), 2f64.powi(-23)),
        ("lg2.approx.f32", |x| x.log2(), 2f64.powi(-22)),
    ] {
        let scale = if instruction.starts_with("ex2") {
            "mul.f32 %f1, %f1, 0f3E000000;"
        } else {
            ""
        };
        let text = kernel(
            2,
            0,
            &format!(
                "mul.wide.u32 %rd3, %i, 4; add.u64 %rd4, %rd0, %rd3; \
                 ld.global.f32 %f1, [%rd4]; cvt.rzi.s64.f32 %rd6, %f1; \
                 {scale} {instruction} %f2, %f1; \
                 add.u64 %rd5, %rd1, %rd3; st.global.f32 [%rd5], %f2;"
            ),
        );
        let mut seen = vec![];
        for seed in [1, 2, 1] {
            let conditions = Conditions {
                perturb: true,
                ..seeded(seed)
            };
            launch(
                &text,
                &shape(1, inputs.len() as u32),
                &[input.address(), output.address()],
                conditions,
            )
            .unwrap();
            for (got, x) in output.read().iter().zip(&inputs) {
                let want = truth(f64::from(*x));
                let error = ((f64::from(*got) - want) / want).abs();
                assert!(error <= bound, "{instruction} of {x}: {got} is not {want}");
            }
            seen.push(output.read());
        }
        assert!(seen[0] != seen[1], "{instruction} is not moved");
        assert_eq!(seen[0], seen[2]);
    }
}

#[test]
fn module_variables_have_their_places_and_contents() {
    let output = buffer(&[0u64; 3]);
    let text = plain(
        "mov.u64 %rd1, table; ld.global.u64 %rd2, [%rd1+8]; \
         st.global.u64 [%rd0], %rd2; ld.global.u64 %rd3, [there]; ld.global.u8 %rd4, [%rd3]; \
         st.global.u64 [%rd0+8], %rd4; ld.const.u32 %rd5, [few+4]; st.global.u64 [%rd0+16], %rd5;",
    );
    let variables = ".global .align 8 .u64 table[2] = {1, 0xffffffffffffffff};\n\
                     .global .align 1 .b8 text[3] = {65, 66, 67};\n\
                     .global .align 8 .u64 there = text+2;\n\
                     .const .align 4 .u32 few[2] = {5, 6};\n.visible";
    ok(&text.replace(".visible", variables), 1, &[output.address()]);
    assert_eq!(output.read(), [u64::MAX, 67, 6]);
}

#[test]
fn a_fault_names_the_source_line() {
    let text = kernel(
        1,
        16,
        ".loc 1 42 3\nmov.u32 %r9, room;\n.loc 1 43 3\nld.shared.u32 %r1, [%r9];",
    )
    .replace(".extern", ".file 1 \"kernels/some.cu\"\n.extern");
    let message = fault(&text, 32, &[0]);
    says(&message, &["of kernels/some.cu:43", "k, block [0, 0, 0]"]);
    says(&message, &["at ld.shared.u32 %r1, [%r9]"]);
}

/// Each block notes its number in the place that it draws.
#[test]
fn all_blocks_run_once_in_an_order_of_the_seed() {
    let order_of = |seed| {
        let (order, next) = (buffer(&[0u32; 40]), buffer(&[0u32]));
        let text = kernel(
            2,
            0,
            "setp.ne.u32 %p1, %i, 0; @%p1 ret; mov.u32 %r1, %ctaid.x; \
             ld.global.u32 %r2, [%rd1]; add.u32 %r3, %r2, 1; st.global.u32 [%rd1], %r3; \
             mad.wide.u32 %rd2, %r2, 4, %rd0; \
             st.global.u32 [%rd2], %r1;",
        );
        let addresses = [order.address(), next.address()];
        let counts = launch(&text, &shape(40, 64), &addresses, seeded(seed)).unwrap();
        assert_eq!(counts.blocks, 40);
        order.read()
    };
    let in_order: Vec<u32> = (0..40).collect();
    assert_eq!(order_of(0), in_order);
    let mut orders: Vec<_> = (1..6).map(order_of).collect();
    for order in &orders {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, in_order);
    }
    orders.push(in_order);
    orders.sort_unstable();
    orders.dedup();
    // Some seeds run them backwards, all of these alike.
    assert!(orders.len() > 3, "{orders:?}");
}

#[test]
fn parameters_are_laid_out_as_c_has_them() {
    let text = format!(
        "{HEADER}.visible .entry k(.param .u32 a, \
         .param .u64 .ptr .global .align 1 b, \
         .param .align 8 .b8 c[20], .param .u16 d) .maxntid 128, 2, 1\n{{ ret; }}"
    );
    let module = Module::parse(&text).unwrap();
    assert_eq!(module.parameters(0), [(0, 4), (8, 8), (16, 20), (36, 2)]);
    assert_eq!(module.max_threads(0), 256);
    assert!(Module::parse("hello").is_err());
}
