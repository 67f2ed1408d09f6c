//! Timelines: what each rank records of its calls, and how the files of a job fit together.

use crate::harness::{Setup, World, spawn};
use flexring::{DType, ReduceOp};
use flexring_core::call::Collective;
use flexring_core::config::{Algorithm, Lowering};
use flexring_core::trace::merge::merge;
use flexring_core::trace::{TraceEvent, TraceFile, TracePath};
use flexring_plan::call_layout::{CallFacts, CallLayout};
use flexring_plan::lowering::{Movement, Plan, ProgramSpec};
use flexring_plan::pipeline::{LinkProfile, Pipeline, Staging};
use flexring_plan::planner::{self, Details};
use flexring_plan::program::{LinkEntry, Program};
use flexring_plan::topology::Topology;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const RANKS: usize = 3;
/// Elements of type f32: many sub-chunks for each rank, and the last ones shorter.
const COUNT: usize = 20_003;

/// A world whose ranks write timelines to `folder`, and whose plan does not depend on the world.
fn traced(world: World, folder: &Path) -> Setup {
    let mut setup = Setup::new(world, RANKS).lowering(Lowering::Chain);
    setup.config.algo = Algorithm::Ring;
    setup.config.trace = Some(setting(folder));
    setup
}

fn setting(folder: &Path) -> String {
    folder.join("trace.json").to_string_lossy().into_owned()
}

fn load(setting: &str, rank: usize) -> TraceFile {
    TraceFile::load(TracePath::new(setting, "", rank).path()).expect("the rank has written its timeline")
}

/// The messages that the program of `rank` sends and receives: peer, step and sub-chunk, with bytes.
fn expected(setup: &Setup, rank: usize) -> [BTreeMap<(usize, u32, u64), u64>; 2] {
    let nodes: Vec<String> = (0..RANKS).map(|rank| setup.config_of(rank).node.unwrap_or_default()).collect();
    let topology = Topology::from_names(&nodes);
    let schedule = planner::plan(Algorithm::Ring, &topology, &Details::default()).expect("a ring");
    let plan = Plan::on(schedule, &topology, Lowering::Chain);
    let program =
        Arc::new(plan.program(rank, ProgramSpec { movement: Movement::Waves, ..ProgramSpec::ALL_REDUCE }));
    let facts = CallFacts {
        collective: Collective::AllReduce,
        count: COUNT as u64,
        element_bytes: DType::F32.size(),
        world: RANKS,
        in_place: true,
        output_bytes: COUNT * DType::F32.size(),
        slot_bytes: setup.config.subchunk.0,
    };
    let layout = CallLayout::new(&facts, &program.held_spans).expect("few sub-chunks");
    let profile = LinkProfile { reads_in_place: true, window: 8, send_slots: 0, recv_slots: 0 };
    let mut pipeline = Pipeline::new(Arc::clone(&program), |_| profile);
    pipeline.start(layout.binding, |_| Staging::default());
    let messages = |program: &Program, of: fn(&Program, usize) -> &[LinkEntry]| {
        let mut messages = BTreeMap::new();
        for peer in program.peers() {
            for LinkEntry { step, .. } in of(program, peer) {
                let lengths = (0..).map(|sub| pipeline.elements(*step, sub));
                let lengths = lengths.take_while(|elements| elements.start < elements.end);
                for (sub, elements) in (0..).zip(lengths) {
                    let bytes = (elements.end - elements.start) * DType::F32.size() as u64;
                    messages.insert((peer, *step, sub), bytes);
                }
            }
        }
        messages
    };
    [
        messages(&program, |program, peer| &program.links[&peer].sends),
        messages(&program, |program, peer| &program.links[&peer].receives),
    ]
}

/// The messages with this name in one call, as [`expected`] gives them. Fails if one is listed twice.
fn recorded(file: &TraceFile, name: &str, call: u64) -> BTreeMap<(usize, u32, u64), u64> {
    let mut messages = BTreeMap::new();
    for TraceEvent { args, .. } in file.trace_events.iter().filter(|event| event.name == name) {
        if args.call == Some(call) {
            let peer = args.peer.expect("a message has a peer") as usize;
            let key = (peer, args.step.expect("a step"), args.sub.expect("a sub-chunk"));
            assert_eq!(messages.insert(key, args.bytes.expect("a length")), None, "{name} {key:?} twice");
        }
    }
    messages
}

/// Checks the form of a file: names, phases, and that spans of a track follow each other or nest.
fn check_form(file: &TraceFile) {
    let mut tracks: BTreeMap<(u32, u32), Vec<(f64, f64)>> = BTreeMap::new();
    let mut names: BTreeMap<(u32, u32), &str> = BTreeMap::new();
    for event in &file.trace_events {
        match event.ph.as_str() {
            "X" => {
                let known = ["send", "receive", "copy", "reduce", "wait", "register"].contains(&&*event.name)
                    || Collective::ALL.iter().any(|collective| collective.name() == event.name);
                assert!(known, "{event:?}");
                let duration = event.dur.expect("a span has a duration");
                assert!(event.ts >= 0.0 && duration >= 0.0 && event.args.call.is_some(), "{event:?}");
                tracks.entry((event.pid, event.tid)).or_default().push((event.ts, event.ts + duration));
            }
            "C" => assert!(event.args.bytes.is_some() && event.dur.is_none(), "{event:?}"),
            "M" => {
                if let ("thread_name", Some(name)) = (event.name.as_str(), &event.args.name) {
                    names.insert((event.pid, event.tid), name);
                }
            }
            "s" | "f" => assert!(event.id.is_some() && event.cat.is_some(), "{event:?}"),
            other => panic!("an event of phase {other}: {event:?}"),
        }
    }
    for (track, mut spans) in tracks {
        assert!(names.contains_key(&track), "track {track:?} has no name");
        // An outer span first, if two begin at the same time.
        spans.sort_by(|one, other| one.0.total_cmp(&other.0).then(other.1.total_cmp(&one.1)));
        let mut open: Vec<f64> = Vec::new();
        for (start, end) in spans {
            // Times are rounded to a part of a nanosecond.
            open.retain(|outer| *outer > start + 1e-4);
            let inside = open.last().is_none_or(|outer| end <= outer + 1e-4);
            assert!(inside, "{}: a span crosses the end of another at {start}", names[&track]);
            open.push(end);
        }
    }
    // All bytes have arrived in the end.
    let mut in_flight: BTreeMap<(u32, &str), u64> = BTreeMap::new();
    for event in file.trace_events.iter().filter(|event| event.ph == "C") {
        in_flight.insert((event.pid, &event.name), event.args.bytes.unwrap_or(0));
    }
    assert!(in_flight.values().all(|bytes| *bytes == 0), "{in_flight:?}");
}

/// Checks that every message of a merged file was received, and not before it was sent. Returns the number of
/// messages.
fn check_order(merged: &TraceFile) -> usize {
    let ends = |phase: &str| -> BTreeMap<&str, f64> {
        let arrows = merged.trace_events.iter().filter(|event| event.ph == phase);
        arrows.map(|event| (event.id.as_deref().unwrap_or_default(), event.ts)).collect()
    };
    let (sent, received) = (ends("s"), ends("f"));
    assert_eq!(sent.len(), received.len());
    for (message, at) in &sent {
        assert!(received[message] >= *at, "{message} was received before it was sent");
    }
    let count = |name: &str| merged.trace_events.iter().filter(|event| event.name == name).count();
    assert_eq!((count("send"), count("receive")), (sent.len(), sent.len()));
    sent.len()
}

#[test]
fn a_timeline_has_exactly_the_transfers_of_the_program() {
    for &world in World::enabled() {
        if world.is_gpu() {
            eprintln!("skipped: vectors on GPUs have other sub-chunks");
            continue;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let setup = traced(world, folder.path());
        spawn(&setup, |comm| {
            for _ in 0..2 {
                let mut vector = vec![comm.rank() as f32; COUNT];
                comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
                assert!(vector.iter().all(|sum| *sum == 3.0));
            }
        });
        let setting = setting(folder.path());
        let files: Vec<TraceFile> = (0..RANKS).map(|rank| load(&setting, rank)).collect();
        for (rank, file) in files.iter().enumerate() {
            check_form(file);
            let [sends, receives] = expected(&setup, rank);
            assert!(sends.len() > 8);
            for call in [1, 2] {
                assert_eq!(recorded(file, "send", call), sends, "{world:?}, rank {rank}, call {call}");
                assert_eq!(recorded(file, "receive", call), receives, "{world:?}, rank {rank}, call {call}");
            }
            let calls = file.trace_events.iter().filter(|event| event.name == "all_reduce");
            assert_eq!(calls.map(|event| event.args.count).collect::<Vec<_>>(), [Some(COUNT as u64); 2]);
        }
        let merged = merge(files).expect("files of one job");
        check_form(&merged);
        assert!(check_order(&merged) > 0);
    }
}

#[test]
fn a_call_that_fails_leaves_a_timeline_at_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let failed = spawn(&traced(World::Local, folder.path()), |comm| {
        let mut vector = vec![1f32; COUNT + comm.rank()];
        comm.all_reduce(&mut vector, ReduceOp::Sum).expect_err("counts differ");
        // Before the communicator is dropped. A rank that came after the failure has not begun the call.
        let file = TraceFile::load(TracePath::new(&setting(folder.path()), "", comm.rank()).path());
        let events = file.map(|file| file.trace_events).unwrap_or_default();
        events.iter().any(|event| event.name == "all_reduce" && event.args.unfinished == Some(true))
    });
    assert!(failed.contains(&true));
}

#[test]
fn sends_and_receives_are_recorded_at_both_ends() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    spawn(&traced(World::any(2), folder.path()), |comm| {
        let (next, previous) = ((comm.rank() + 1) % RANKS, (comm.rank() + RANKS - 1) % RANKS);
        for _ in 0..3 {
            let (send, mut receive) = (vec![1f32; COUNT], vec![0f32; COUNT]);
            let send = flexring::Operation::send(&send, next);
            let receive = flexring::Operation::recv(&mut receive, previous);
            comm.group([send, receive]).expect("a message");
        }
        comm.barrier().expect("all ranks");
    });
    let setting = setting(folder.path());
    let merged = merge((0..RANKS).map(|rank| load(&setting, rank)).collect()).expect("files of one job");
    let mut form = merged.clone();
    form.trace_events.retain(|event| event.name != "send_recv");
    check_form(&form);
    assert!(check_order(&merged) >= RANKS * 3);
}

mod command {
    use super::*;
    use crate::command::run;
    use std::process::{Command, Stdio};

    #[test]
    fn perf_merges_the_timelines_of_its_ranks() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let setting = setting(folder.path());
        let arguments = format!("perf --ranks 2 -b 1M -e 1M -n 2 -w 0 -c 0 --trace {setting}");
        let (code, out, err) = run(&arguments, &[]);
        assert_eq!(code, Some(0), "{out}{err}");
        let merged = TraceFile::load(Path::new(&setting)).expect("the merged file");
        check_form(&merged);
        assert!(check_order(&merged) > 0);
        let ranks: Vec<usize> = merged.other_data.ranks.iter().map(|rank| rank.origin.rank).collect();
        assert_eq!(ranks, [0, 1]);
        assert_eq!(TracePath::written(&setting).expect("the folder"), Vec::<std::path::PathBuf>::new());
        let place = format!("timeline: {setting} (open in https://ui.perfetto.dev)\n");
        assert!(out.ends_with(&format!("# {place}")), "{out}");
        let timed = merged.trace_events.iter().filter(|event| event.ph != "M");
        assert_eq!(timed.map(|event| event.ts).fold(f64::INFINITY, f64::min), 0.0);
        // The merged file is read again, and copied.
        let copy = folder.path().join("copy.json");
        let (code, out, err) = run(&format!("trace {setting}"), &[]);
        assert_eq!(code, Some(0), "{out}{err}");
        assert_eq!(out.lines().filter(|line| line.contains(" %")).count(), 2, "{out}");
        assert!(out.ends_with(&place), "{out}");
        let (code, out, err) = run(&format!("trace {setting} -o {}", copy.display()), &[]);
        assert_eq!(code, Some(0), "{out}{err}");
        assert!(out.contains(&format!("timeline: {} (open", copy.display())), "{out}");
        assert_eq!(TraceFile::load(&copy).expect("the copy").trace_events, merged.trace_events);
    }

    #[test]
    fn the_files_of_a_job_are_merged_and_lost_spans_reported() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let setting = setting(folder.path());
        let variables = [("FLEXRING_TRACE", setting.as_str()), ("FLEXRING_TRACE_EVENTS", "1024")];
        let (code, out, err) = run("perf --ranks 2 -b 16M -e 16M -n 8 -w 0 -c 0", &variables);
        assert_eq!(code, Some(0), "{out}{err}");
        let output = folder.path().join("merged.json");
        let (code, out, err) = run(&format!("trace {setting} --output {}", output.display()), &[]);
        assert_eq!(code, Some(0), "{out}{err}");
        assert!(out.contains("raise FLEXRING_TRACE_EVENTS"), "{out}");
        assert_eq!(out.lines().filter(|line| line.contains(" %")).count(), 2, "{out}");
        let of_rank = |rank: usize| folder.path().join(format!("trace.rank{rank}.json"));
        let (code, _, err) = run(&format!("trace {setting} -o {}", of_rank(0).display()), &[]);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("trace.rank0.json is the timeline of a rank: give another --output"), "{err}");
        std::fs::remove_file(of_rank(1)).expect("it was there");
        let (code, out, err) = run(&format!("trace {setting} -o {}/one.json", folder.path().display()), &[]);
        assert_eq!(code, Some(0), "{out}{err}");
        assert!(
            out.contains("rank 1 of 2 has no file here: copy it next to the others, and merge again\n"),
            "{out}"
        );
        let merged = TraceFile::load(&output).expect("the merged file");
        let spans = merged.trace_events.iter().filter(|event| event.ph == "X").count();
        assert!((1024..4 * 1024).contains(&spans), "{spans}");
    }

    #[test]
    fn paths_that_cannot_be_used_are_quoted() {
        let (code, out, err) = run("perf --ranks 2 -e 8 --trace /no/folder/t.json", &[]);
        assert_eq!(code, Some(1), "{out}{err}");
        assert!(err.contains("cannot create /no/folder/t.json, whose folder must exist"), "{err}");
        let (code, out, err) = run("perf --ranks 2 -e 8", &[("FLEXRING_TRACE", "/no/folder/t.json")]);
        assert_eq!(code, Some(1), "{out}{err}");
        let message = "FLEXRING_TRACE=\"/no/folder/t.json\" cannot be used: cannot create /no/folder/t.rank";
        assert!(err.contains(message), "{err}");
        let (code, _, err) = run("perf --ranks 2 -e 8", &[("FLEXRING_TRACE_EVENTS", "7")]);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("FLEXRING_TRACE_EVENTS=\"7\""), "{err}");
        let (code, _, err) = run("trace /no/folder/t.json", &[]);
        assert!(code == Some(1) && err.contains("cannot read /no/folder"), "{code:?} {err}");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let setting = setting(folder.path());
        let (code, _, err) = run(&format!("trace {setting}"), &[]);
        assert!(
            code == Some(2) && err.contains("no rank has written a timeline for FLEXRING_TRACE="),
            "{err}"
        );
        std::fs::write(folder.path().join("trace.rank0.json"), "[]").expect("the file is written");
        let (code, _, err) = run(&format!("trace {setting}"), &[]);
        assert!(code == Some(1) && err.contains("trace.rank0.json is no trace of a rank: "), "{err}");
    }

    /// Starts the command as a rank of a job at this port, by `launcher` if there is one.
    fn rank(launcher: &[&str], rank: usize, port: u16, setting: &str) -> std::process::Child {
        let words = launcher.iter().copied().chain([env!("CARGO_BIN_EXE_flexring")]);
        let words = words.chain("perf -b 1M -e 1M -n 2 -w 0 -c 0".split(' '));
        let words: Vec<&str> = words.collect();
        Command::new(words[0])
            .args(&words[1..])
            .env("FLEXRING_RANK", rank.to_string())
            .env("FLEXRING_WORLD_SIZE", "2")
            .env("FLEXRING_MASTER_ADDR", "127.0.0.1")
            .env("FLEXRING_MASTER_PORT", port.to_string())
            .env("FLEXRING_TRACE", setting)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts")
    }

    #[test]
    fn the_clock_of_another_time_namespace_is_aligned() {
        let shifted = ["unshare", "--time", "--monotonic", "1000"];
        let can_shift = Command::new(shifted[0]).args(&shifted[1..]).arg("true").output();
        if !can_shift.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: no time namespace can be made here");
            return;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let setting = setting(folder.path());
        let port = crate::harness::free_port();
        let ranks = [rank(&[], 0, port, &setting), rank(&shifted, 1, port, &setting)];
        for child in ranks {
            let output = child.wait_with_output().expect("the command ends");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        let files = vec![load(&setting, 0), load(&setting, 1)];
        let clock = files[1].other_data.ranks[0].clock;
        let offset = clock.offset_ns as f64 / 1e9;
        assert!((-1000.0 - 10.0..-1000.0 + 10.0).contains(&offset), "{clock:?}");
        assert!(clock.error_ns > 0 && files[0].other_data.ranks[0].clock.error_ns == 0);
        let mut merged = merge(files).expect("files of one job");
        // The offset may be wrong by its error.
        for event in merged.trace_events.iter_mut().filter(|event| event.ph == "f") {
            event.ts += clock.error_ns as f64 / 1e3;
        }
        assert!(check_order(&merged) > 0);
    }
}
