//! `flexring doctor --pair`: tests the RDMA ports between the nodes of a job.
//!
//! Owns the order of the tests, which is the same on all ranks, and the report. The ranks find each other
//! over TCP, and match ports that reach each other, as links of a job do. Then the ranks whose ports match
//! make a communicator that uses these ports only.

use super::division::{self, DividedPorts};
use super::pair_facts::{NodeFacts, RailTest};
use super::pair_findings::findings;
use crate::error::CommandError;
use crate::output;
use crate::perf;
use flexring::internal::transport::verbs::inventory::{loss_signs, retransmissions};
use flexring::internal::transport::verbs::port_selection::{Rail, describe_mismatch, match_rails};
use flexring::{Communicator, Error, Identity, ReduceOp, UniqueId, create_unique_id};
use flexring_core::config::{Config, TransportChoice};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Elements of the vectors that are added: 16 MiB.
const ELEMENTS: usize = 4 << 20;

/// Timed all-reduces of a test.
const REPEATS: u32 = 3;

/// What a rank found in a test.
#[derive(Serialize, Deserialize)]
struct RankOutcome {
    /// Gigabytes per second, with vectors on the host and on a GPU.
    rates: Result<(f64, Option<f64>), String>,
    retransmissions: u64,
    signs: BTreeMap<String, u64>,
}

/// The report of all ranks.
#[derive(Clone, Debug, Serialize)]
struct PairReport {
    nodes: Vec<NodeFacts>,
    tests: Vec<RailTest>,
    /// What a job with a rank for each GPU would use, by the rank's number on its node.
    division: Vec<DividedPorts>,
    /// What is wrong or unusual.
    findings: Vec<String>,
}

/// Runs the tests as a rank of the job that the environment describes. Rank 0 prints the report.
///
/// # Errors
/// Usage without a job of several ranks; failure of a test, which the report says.
pub fn run(json: bool) -> Result<(), CommandError> {
    let config = Config::from_env()?;
    let usage = || {
        let message = "doctor --pair is for jobs: start it as one rank on each of two or more nodes, as with mpirun or srun";
        CommandError::Usage(message.to_owned())
    };
    let identity = Identity::from_env(&config).map_err(|_| usage())?;
    if identity.world < 2 {
        return Err(usage());
    }
    let over_tcp = Config { transport: TransportChoice::Tcp, ..config.clone() };
    let control = Communicator::with_config(&over_tcp, &identity)?;
    let (mine, rails, offers) = NodeFacts::gather(&identity, &config);
    let nodes = exchange(&control, &mine)?;
    let rails: Vec<Vec<Rail>> = exchange(&control, &rails)?;
    let division = division::divide(&exchange(&control, &offers)?, &config);
    let (matched, alone): (Vec<_>, Vec<_>) =
        match_rails(&rails).into_iter().partition(|group| group.iter().flatten().count() > 1);
    let tests = matched.iter().map(|group| test(&control, &config, &nodes, &rails, group));
    let tests = tests.collect::<Result<Vec<_>, _>>()?;
    let mut findings = findings(&nodes, &tests);
    findings.extend(alone.iter().filter_map(|group| unreachable(&nodes, &rails, group)));
    let hosts: Vec<&str> = nodes.iter().map(|node| &*node.host).collect();
    findings.extend((0..).zip(&division).flat_map(|(number, ranks)| ranks.findings(number, &hosts, &config)));
    let report = PairReport { nodes, tests, division, findings };
    if identity.rank == 0 {
        output::print(&if json { output::json(&report)? } else { report.text() })?;
    }
    if report.works() { Ok(()) } else { Err(CommandError::Reported) }
}

/// Gathers a value of every rank, by rank.
fn exchange<T: Serialize + DeserializeOwned>(control: &Communicator, mine: &T) -> Result<Vec<T>, Error> {
    let failed = |cause| Error::internal(format!("cannot exchange facts: {cause}"));
    let text = serde_json::to_vec(mine).map_err(failed)?;
    let mut longest = [text.len() as u64];
    control.all_reduce(&mut longest, ReduceOp::Max)?;
    // Text of JSON has no zero bytes.
    let longest = longest[0] as usize;
    let mut all = vec![0_u8; longest * control.world_size()];
    all[longest * control.rank()..][..text.len()].copy_from_slice(&text);
    control.all_gather_in_place(&mut all)?;
    let parts = all.chunks(longest).map(|part| part.split(|byte| *byte == 0).next().unwrap_or_default());
    parts.map(|text| serde_json::from_slice(text).map_err(failed)).collect()
}

/// Tests ports that reach each other, which have these positions, by rank.
///
/// # Errors
/// Those of the exchange, not of the test.
fn test(
    control: &Communicator,
    config: &Config,
    nodes: &[NodeFacts],
    rails: &[Vec<Rail>],
    group: &[Option<usize>],
) -> Result<RailTest, Error> {
    let members: Vec<usize> = (0..group.len()).filter(|rank| group[*rank].is_some()).collect();
    let mut id = [0; UniqueId::SIZE];
    if control.rank() == members[0] {
        id = *create_unique_id(config)?.as_bytes();
    }
    control.broadcast(&mut id, members[0])?;
    let on_gpus = members.iter().all(|rank| nodes[*rank].has_gpu);
    let mine = members.iter().position(|rank| *rank == control.rank()).zip(group[control.rank()]);
    let outcome = mine.map(|(at, port)| {
        let rail = &rails[control.rank()][port];
        let one_port = Config {
            transport: TransportChoice::Verbs,
            ib_hca: Some(format!("={}:{}", rail.device, rail.port)),
            ib_rails: 1,
            gpu: if on_gpus { config.gpu.or(Some(0)) } else { config.gpu },
            ..config.clone()
        };
        let count = || retransmissions(Path::new("/"), &rail.device, rail.port).unwrap_or(0);
        let signs = || loss_signs(Path::new("/"), &rail.device, rail.port);
        let (before, signs_before) = (count(), signs());
        let measured = measure(&one_port, (at, members.len()), &id, on_gpus);
        let new = |((name, meaning, now), (_, _, before)): (Sign, Sign)| {
            (now > before).then(|| (format!("{name} ({meaning})"), now - before))
        };
        RankOutcome {
            rates: measured.map_err(|error| error.message().to_owned()),
            retransmissions: count().saturating_sub(before),
            signs: signs().into_iter().zip(signs_before).filter_map(new).collect(),
        }
    });
    let port = |rank: usize| group[rank].map(|port| &nodes[rank].ports[port]);
    let ports = || (0..group.len()).map(port);
    let mut new = RailTest {
        ports: ports().map(|port| port.map(|port| port.name.clone())).collect(),
        rate_gbps: ports().flatten().map(|port| port.rate_gbps).fold(f64::INFINITY, f64::min),
        gbytes_per_second: None,
        failure: None,
        gpu_gbytes_per_second: None,
        retransmissions: 0,
        signs: BTreeMap::new(),
    };
    let slowest = |known: Option<f64>, rate: f64| Some(known.map_or(rate, |known| rate.min(known)));
    for RankOutcome { rates, retransmissions, signs } in exchange(control, &outcome)?.into_iter().flatten() {
        new.retransmissions += retransmissions;
        signs.into_iter().for_each(|(sign, count)| *new.signs.entry(sign).or_default() += count);
        match rates {
            Ok((rate, on_gpu)) => {
                new.gbytes_per_second = slowest(new.gbytes_per_second, rate);
                new.gpu_gbytes_per_second =
                    on_gpu.map_or(new.gpu_gbytes_per_second, |rate| slowest(new.gpu_gbytes_per_second, rate));
            }
            Err(failure) => new.failure = new.failure.or(Some(failure)),
        }
    }
    if new.failure.is_some() {
        (new.gbytes_per_second, new.gpu_gbytes_per_second) = (None, None);
    }
    Ok(new)
}

/// What is said of a port without a counterpart, if it reaches no port of another rank. If it reaches some,
/// nodes have different numbers of ports.
fn unreachable(nodes: &[NodeFacts], rails: &[Vec<Rail>], group: &[Option<usize>]) -> Option<String> {
    let (rank, port) = (0..).zip(group).find_map(|(rank, port)| Some((rank, (*port)?)))?;
    let one = [rails[rank][port].clone()];
    let reaches = |other: &Vec<Rail>| match_rails(&[one.to_vec(), other.clone()])[0][1].is_some();
    let mut others = rails.iter().enumerate().filter(|(other, rails)| *other != rank && !rails.is_empty());
    let (other, _) = others.clone().next()?;
    if others.any(|(_, rails)| reaches(rails)) {
        return None;
    }
    let name = format!("{} of {}", nodes[rank].ports[port].name, nodes[rank].host);
    let mismatch = describe_mismatch((rank, &one), (other, &rails[other]));
    Some(format!("{name} reaches no port of another rank: {mismatch}"))
}

/// A counter: its name, what it means, and its value.
type Sign = (&'static str, &'static str, u64);

/// Adds vectors over one port as this rank of a world of this size, and checks the sums. Returns gigabytes
/// per second in each direction, of vectors on the host and, if asked for, on GPUs.
fn measure(
    config: &Config,
    (rank, world): (usize, usize),
    id: &[u8],
    on_gpus: bool,
) -> Result<(f64, Option<f64>), Error> {
    let identity = Identity::from_unique_id(world, &UniqueId::from_bytes(id)?, rank)?;
    let comm = Communicator::with_config(config, &identity)?;
    let mut vector = comm.alloc::<u32>(ELEMENTS)?;
    let fill = |vector: &mut [u32]| (0..).zip(vector).for_each(|(at, element)| *element = at);
    fill(&mut vector);
    comm.all_reduce(&mut vector, ReduceOp::Sum)?;
    let begun = Instant::now();
    for _ in 0..REPEATS {
        comm.all_reduce(&mut vector, ReduceOp::Sum)?;
    }
    let rate = rate_of(&vector, begun.elapsed(), world)?;
    if !on_gpus {
        return Ok((rate, None));
    }
    let mut on_gpu = perf::gpu::Vectors::<u32>::new(config.gpu.unwrap_or(0), ELEMENTS, None)?;
    fill(&mut vector);
    let mut result = vector.to_vec();
    on_gpu.write(&vector, &result)?;
    let call = || perf::gpu::GpuCall::sum_in_place(&comm, ELEMENTS);
    on_gpu.call(call())?;
    on_gpu.wait()?;
    let begun = Instant::now();
    for _ in 0..REPEATS {
        on_gpu.call(call())?;
    }
    on_gpu.wait()?;
    let took = begun.elapsed();
    on_gpu.read(&mut vector, &mut result)?;
    let on_gpu = rate_of(&result, took, world);
    Ok((rate, Some(on_gpu.map_err(|error| error.context("GPU memory"))?)))
}

/// Checks the sums of a test whose timed calls took so long. Returns gigabytes per second.
fn rate_of(sums: &[u32], took: Duration, world: usize) -> Result<f64, Error> {
    let factor = (world as u32).wrapping_pow(REPEATS + 1);
    let is_wrong = |(at, sum): &(u32, &u32)| **sum != at.wrapping_mul(factor);
    let wrong = (0..).zip(sums).filter(is_wrong).count();
    if wrong > 0 {
        return Err(Error::system(format!("{wrong} of {ELEMENTS} sums are wrong")));
    }
    let bytes = 2.0 * (world - 1) as f64 / world as f64 * (4 * ELEMENTS) as f64;
    Ok(f64::from(REPEATS) * bytes / took.as_secs_f64() / 1e9)
}

impl PairReport {
    /// Whether all ports of all nodes work, and each reaches one of every other node.
    fn works(&self) -> bool {
        let tested = self.tests.len();
        tested > 0
            && self.nodes.iter().all(|node| node.ports.len() == tested)
            && self.tests.iter().all(|test| test.failure.is_none())
    }

    fn text(&self) -> String {
        /// Ranks whose ports a line names; of more, the first and the last.
        const MOST: usize = 4;
        let mut text = String::new();
        for (at, test) in self.tests.iter().enumerate() {
            let named: Vec<String> = self
                .nodes
                .iter()
                .zip(&test.ports)
                .filter_map(|(node, port)| Some(format!("{} {}", node.host, port.as_ref()?)))
                .collect();
            let named = match &named[..] {
                [first, .., last] if named.len() > MOST => {
                    format!("{first} to {last}, {} ranks", named.len())
                }
                all => all.join(" - "),
            };
            let outcome = match (test.gbytes_per_second, &test.failure) {
                (Some(rate), _) => {
                    let on_gpu = test.gpu_gbytes_per_second;
                    let on_gpu = on_gpu.map_or_else(String::new, |rate| format!(", GPU memory {rate:.2}"));
                    format!("works   {rate:6.2} GB/s of {:.1}{on_gpu}", test.rate_gbps / 8.0)
                }
                (None, failure) => format!("FAILED  {}", failure.as_deref().unwrap_or("no rank says why")),
            };
            let _ = writeln!(text, "rail {at:<3} {named:<44} {outcome}");
        }
        let hosts: Vec<&str> = self.nodes.iter().map(|node| &*node.host).collect();
        for (number, ranks) in self.division.iter().enumerate() {
            let _ = writeln!(text, "{}", ranks.line(number, &hosts));
        }
        for finding in &self.findings {
            let _ = writeln!(text, "note     {finding}");
        }
        let failed = self.tests.iter().filter(|test| test.failure.is_some()).count();
        let verdict = match (self.tests.len(), failed) {
            (0, _) => "no port was tested".to_owned(),
            (_, 0) if !self.works() => "some ports have no counterpart, the others work".to_owned(),
            (all, 0) => format!(
                "all {} between {} work",
                output::counted(all, "rail"),
                output::counted(self.nodes.len(), "rank")
            ),
            (all, failed) => format!("{failed} of {} failed", output::counted(all, "rail")),
        };
        text + &verdict + "\n"
    }
}
