//! The verifier proves that the programs of a world are correct.
//!
//! Owns the proofs. Must not know which planner or lowering made the programs, and repeats none of their
//! reasoning. The proofs hold for every count, sub-chunk size, window and number of slots:
//!
//! 1. **Sums.** Every part of every rank's result contains every rank's contribution exactly once. Helpers
//!    contribute nothing and have no result.
//! 2. **Bits.** Ranks that get the same part compute it by the same additions in the same order.
//! 3. **Links.** Both ends of every link list the same messages in the same order.
//! 4. **Progress.** There is one order of all messages of the world in which every step comes after the steps
//!    that it waits for. So the earliest unfinished message can always move (see
//!    [`pipeline`](super::pipeline)).
//! 5. **Memory.** Each step waits for every earlier step that still reads what it overwrites, or still writes
//!    what it reads, and for every step that still uses its place in scratch memory for earlier sub-chunks.
//! 6. **Places.** Each block of an all-to-all by node has one place, equal on all ranks, and each message is
//!    one piece of memory.
//!
//! | module | proves |
//! |---|---|
//! | `symbolic` | sums, bits, and that the run does not deadlock |
//! | `ordering` | links, progress |
//! | `hazards` | memory |
//! | `places` | places |
//! | `segments` | nothing: it cuts the vector for the others |

mod hazards;
mod ordering;
mod places;
mod segments;
mod symbolic;

use super::Rank;
use super::lowering::{Movement, Plan, ProgramSpec};
use super::program::Program;
use flexring_core::call::Collective;
use flexring_core::error::{Error, Result};
use std::collections::BTreeSet;
use std::sync::Arc;
use symbolic::SymbolicRun;

/// A plan that passed the verifier.
#[derive(Clone, Debug)]
pub struct VerifiedPlan(Arc<Plan>);

impl VerifiedPlan {
    /// Verifies the all-reduce of `plan`, with and without waves. The other collectives consist of its
    /// halves: the reduction to the owners, and the distribution from the owners.
    ///
    /// # Errors
    /// As for [`verify`].
    pub fn new(plan: Plan) -> Result<Self> {
        for movement in [Movement::Waves, Movement::Spans] {
            verify(&plan, ProgramSpec { movement, ..ProgramSpec::ALL_REDUCE })?;
        }
        Ok(Self(Arc::new(plan)))
    }

    /// Verifies every collective that depends on `plan`, with and without waves, in reproducible order with
    /// pre-multiplied inputs, and one-shot. A barrier is an all-reduce. A plan with helpers is for
    /// all-reduces only: the other collectives give each rank a part or a result.
    ///
    /// # Errors
    /// As for [`verify`].
    pub fn for_all(plan: Plan) -> Result<Self> {
        if !plan.schedule().helpers().is_empty() {
            return Self::new(plan);
        }
        let last = plan.schedule().world().saturating_sub(1);
        let depends_on_plan = |collective: &Collective| {
            // Those depend on the number of ranks only, and the proof of an all-to-all takes memory for its
            // cube.
            !collective.is_straight() && *collective != Collective::Barrier
        };
        for collective in Collective::ALL.into_iter().filter(depends_on_plan) {
            for (movement, reproducible) in
                [(Movement::Waves, false), (Movement::Spans, false), (Movement::Waves, true)]
            {
                if reproducible && !collective.reduces() {
                    continue;
                }
                for root in if collective.has_root() { vec![0, last] } else { vec![0] } {
                    verify(
                        &plan,
                        ProgramSpec { collective, root, movement, reproducible, prescale: reproducible },
                    )?;
                }
            }
        }
        verify(&plan, ProgramSpec { movement: Movement::OneShot, ..ProgramSpec::ALL_REDUCE })?;
        Ok(Self(Arc::new(plan)))
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.0
    }
}

/// Verifies the programs of `plan` for `spec`.
///
/// # Errors
/// `InvalidSetting`, naming the property that fails, the span and the ranks.
pub fn verify(plan: &Plan, spec: ProgramSpec) -> Result<()> {
    let world = plan.schedule().world();
    let programs: Vec<Program> = (0..world).map(|rank| plan.program(rank, spec)).collect();
    verify_with_helpers(&programs, plan.schedule().helpers(), spec).map_err(|message| {
        let name = plan.schedule().name();
        Error::invalid_setting(format!("the {name} plan does not hold: {message}"))
    })
}

/// Verifies `programs`, which are those of all ranks in rank order. The error is a clause for a message.
///
/// # Errors
/// The property that fails, with span and ranks.
pub fn verify_programs(programs: &[Program], spec: ProgramSpec) -> std::result::Result<(), String> {
    verify_with_helpers(programs, &BTreeSet::new(), spec)
}

fn verify_with_helpers(
    programs: &[Program],
    helpers: &BTreeSet<Rank>,
    spec: ProgramSpec,
) -> std::result::Result<(), String> {
    ordering::links(programs)?;
    for program in programs {
        ordering::progress(program)?;
        hazards::memory(program)?;
    }
    places::blocks(programs)?;
    SymbolicRun::new(programs, helpers).run(spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_order::BlockOrder;
    use crate::fraction::Span;
    use crate::planner::ring;
    use crate::program::{Body, BufferKind, DependencyKind, OperandSource, Step, StepId, StepPlace};
    use crate::schedule::{Group, Schedule};
    use crate::topology::Topology;
    use flexring_core::config::Lowering;

    const SPEC: ProgramSpec = ProgramSpec { movement: Movement::Waves, ..ProgramSpec::ALL_REDUCE };

    /// The verifier's error for a ring of three ranks after `change`, or "holds".
    fn outcome(lowering: Lowering, change: impl FnOnce(&mut [Program])) -> String {
        let topology = Topology::from_names(&["a", "b", "c"]);
        let plan = Plan::on(ring::plan(&topology), &topology, lowering);
        let mut programs: Vec<Program> = (0..3).map(|rank| plan.program(rank, SPEC)).collect();
        change(&mut programs);
        verify_programs(&programs, SPEC).err().unwrap_or_else(|| "holds".to_owned())
    }

    fn change_operands(program: &mut Program, step: usize, change: impl FnOnce(&mut Vec<OperandSource>)) {
        let Body::Combine { operands, .. } = Arc::make_mut(&mut program.steps[step].body) else {
            panic!("step {step} is not a combine")
        };
        let mut changed = operands.to_vec();
        change(&mut changed);
        *operands = changed.into();
    }

    /// The first step of a program that adds two or more operands.
    fn reduction(program: &Program) -> usize {
        let adds = |step: &Step| matches!(&*step.body, Body::Combine { operands, .. } if operands.len() > 1);
        program.steps.iter().position(adds).expect("every rank of a ring adds")
    }

    #[test]
    fn correct_programs_pass() {
        for lowering in [Lowering::Auto, Lowering::Chain, Lowering::Direct] {
            assert_eq!(outcome(lowering, |_| {}), "holds");
        }
    }

    #[test]
    fn helpers_add_what_others_send_and_contribute_nothing() {
        // Two servers for three workers, each of which adds a half; then a server for each of two nodes.
        let halves = |workers: Vec<Rank>| {
            let half = |part| Group::of(Span::part(part, 2), workers.clone(), 3 + part);
            vec![vec![half(0), half(1)]]
        };
        let nodes = |second: Vec<Rank>| {
            let node = Group::of(Span::WHOLE, vec![0, 1], 3);
            vec![vec![node], vec![Group::of(Span::WHOLE, second, 4)]]
        };
        let outcome = |levels: Vec<Vec<Group>>, helpers: &[Rank], lowering| {
            let topology = Topology::from_names(&["a", "a", "b", "c", "d"]);
            let schedule = Schedule::new("servers", 5, levels);
            let schedule = schedule.with_helpers(helpers.iter().copied().collect());
            let plan = Plan::on(schedule, &topology, lowering);
            VerifiedPlan::for_all(plan)
                .map_or_else(|error| error.message().to_owned(), |_| "holds".to_owned())
        };
        for lowering in [Lowering::Direct, Lowering::Chain] {
            let outcome = |levels, helpers| outcome(levels, helpers, lowering);
            assert_eq!(outcome(halves(vec![0, 1, 2]), &[3, 4]), "holds");
            assert_eq!(outcome(nodes(vec![3, 2]), &[3, 4]), "holds");
            let error = outcome(halves(vec![0, 1, 2]), &[4]);
            assert!(error.contains("the contribution of rank 3 to [0, 1/2) is missing"), "{error}");
            let error = outcome(halves(vec![0, 1, 2, 3]), &[3, 4]);
            assert!(error.contains("rank 3 is a helper, but contributes to "), "{error}");
            let error = outcome(nodes(vec![2]), &[3, 4]);
            assert!(error.contains("the contribution of rank ") && error.contains("is missing"), "{error}");
            let error = outcome(nodes(vec![3, 2, 1]), &[3, 4]);
            assert!(error.contains("is counted more than once"), "{error}");
        }
    }

    #[test]
    fn each_kind_of_error_is_found_and_named() {
        let error = outcome(Lowering::Direct, |programs| {
            let step = reduction(&programs[1]);
            change_operands(&mut programs[1], step, |operands| {
                operands.retain(|operand| !matches!(operand, OperandSource::Own { .. }));
            });
        });
        assert!(error.starts_with("the contribution of rank 1 to [1/3, 2/3) is missing"), "{error}");

        let error = outcome(Lowering::Direct, |programs| {
            let step = reduction(&programs[2]);
            change_operands(&mut programs[2], step, |operands| {
                let own = operands.iter().copied().find(|o| matches!(o, OperandSource::Own { .. }));
                operands.extend(own);
            });
        });
        assert!(
            error.starts_with("the contribution of rank 2 to [2/3, 1) is counted more than once"),
            "{error}"
        );

        let error = outcome(Lowering::Chain, |programs| {
            let traffic = programs[0].links.values_mut().find(|traffic| traffic.sends.len() > 1);
            traffic.expect("every rank of a ring sends").sends.swap(0, 1);
        });
        assert!(error.starts_with("rank 0 sends "), "{error}");

        let error = outcome(Lowering::Chain, |programs| {
            let step = reduction(&programs[0]);
            programs[0].steps[step].depth = 9;
        });
        assert!(error.contains("expects"), "{error}");

        let error = outcome(Lowering::Chain, |programs| {
            let step = reduction(&programs[0]) as StepId;
            let waiting = programs[0].dependents(step)[0];
            programs[0].remove_dependencies(waiting);
        });
        assert!(error.contains(" does not wait for step "), "{error}");
    }

    #[test]
    fn places_of_scratch_memory_that_are_used_again_too_early_are_found() {
        let topology = Topology::from_names(&["a", "b", "c"]);
        let plan = Plan::on(ring::plan(&topology), &topology, Lowering::Chain);
        let spec = ProgramSpec { collective: Collective::ReduceScatter, ..SPEC };
        let outcome = |change: fn(&mut Program)| {
            let mut programs: Vec<Program> = (0..3).map(|rank| plan.program(rank, spec)).collect();
            change(&mut programs[1]);
            verify_programs(&programs, spec).err().unwrap_or_else(|| "holds".to_owned())
        };
        assert_eq!(outcome(|_| {}), "holds");
        let error = outcome(|program| {
            let waits =
                |step: &StepId| program.dependencies(*step).iter().any(|on| on.kind == DependencyKind::Reuse);
            let first = (0..program.steps.len() as StepId).find(waits).expect("rank 1 is within a chain");
            program.remove_dependencies(first);
        });
        assert!(error.starts_with("rank 1: step ") && error.contains("the place of "), "{error}");
        let error = outcome(|program| program.scratch[0].hops = 0);
        assert!(error.contains(" waits for the memory of ") && error.contains("due later"), "{error}");
    }

    #[test]
    fn collectives_that_depend_on_no_plan_hold_for_any_number_of_ranks() {
        for world in 1..=9 {
            let topology = Topology::from_names(&vec!["a"; world]);
            let plan = Plan::on(ring::plan(&topology), &topology, Lowering::Auto);
            for collective in Collective::ALL.into_iter().filter(|collective| collective.is_straight()) {
                for root in if collective.has_root() { 0..world } else { 0..1 } {
                    verify(&plan, ProgramSpec { collective, root, ..SPEC }).expect("it holds");
                }
            }
        }
    }

    /// The verifier's error for an all-to-all by node of these ranks after `change`, or "holds".
    fn by_node(names: &[&str], change: impl FnOnce(&mut [Program])) -> String {
        let topology = Topology::from_names(names);
        let plan = Plan::on(ring::plan(&topology), &topology, Lowering::Auto);
        let spec = ProgramSpec {
            collective: Collective::AllToAll,
            movement: Movement::ByNode,
            ..ProgramSpec::ALL_REDUCE
        };
        let mut programs: Vec<Program> = (0..names.len()).map(|rank| plan.program(rank, spec)).collect();
        change(&mut programs);
        verify_programs(&programs, spec).err().unwrap_or_else(|| "holds".to_owned())
    }

    #[test]
    fn blocks_that_go_by_node_arrive_once_on_nodes_of_any_size() {
        let names = [
            &["a"][..],
            &["a", "b"],
            &["a", "a", "b"],
            &["a", "b", "b", "b"],
            &["a", "a", "a", "b", "b"],
            &["a", "b", "a", "c", "b", "a", "c", "d"],
            &["a", "a", "a", "a", "b", "c", "c", "d", "d", "d"],
        ];
        for names in names {
            assert_eq!(by_node(names, |_| {}), "holds", "{names:?}");
        }
    }

    #[test]
    fn each_kind_of_error_in_blocks_that_go_by_node_is_found_and_named() {
        const NAMES: [&str; 5] = ["a", "a", "a", "b", "b"];
        let forwards = |program: &Program| {
            let forwards = |step: &Step| {
                matches!(*step.body, Body::Send { buffer: BufferKind::Transit, .. }) && step.depth == 1
            };
            program.steps.iter().position(forwards).expect("a leader") as StepId
        };
        let error = by_node(&NAMES, |programs| {
            let step = forwards(&programs[0]);
            programs[0].remove_dependencies(step);
        });
        assert!(error.starts_with("rank 0: step ") && error.contains("that it passes on"), "{error}");

        // The leader gives each of two neighbours the block of the other.
        let error = by_node(&NAMES, |programs| {
            let sends: Vec<usize> = (0..programs[0].steps.len())
                .filter(|step| programs[0].steps[*step].depth == 2)
                .filter(|step| matches!(*programs[0].steps[*step].body, Body::Send { .. }))
                .collect();
            let place = |step: usize| Arc::clone(&programs[0].steps[step].place);
            let (one, other) = (place(sends[0]), place(sends[1]));
            programs[0].steps[sends[0]].place = other;
            programs[0].steps[sends[1]].place = one;
        });
        assert!(error.starts_with("rank 0 sends ") || error.contains("expects"), "{error}");

        let error = by_node(&NAMES, |programs| {
            let other = Topology::from_names(&["a", "a", "b", "b", "b"]);
            programs[4].blocks = Some(Arc::new(BlockOrder::by_node(&other)));
        });
        assert_eq!(error, "ranks 0 and 4 number the blocks differently");

        // Ranks 0 and 2 share a node, so blocks for it lie apart in the vectors of the other nodes' ranks.
        let error = by_node(&["a", "b", "a"], |programs| {
            let order = Arc::clone(programs[0].blocks.as_ref().expect("an order"));
            let step = programs[1].steps.iter_mut().find(|step| step.destination() == BufferKind::Transit);
            let place = &mut step.expect("it packs").place;
            *place = Arc::new(StepPlace { span: order.between(1, 0), ..**place });
        });
        assert!(error.contains("is not one piece") || error.contains("kept twice"), "{error}");

        // A block that goes to the wrong rank.
        let error = by_node(&NAMES, |programs| {
            for program in programs.iter_mut() {
                program.steps.retain(|_| true);
            }
            let steps = &mut programs[4].steps;
            let step = steps.iter_mut().find(|step| step.is_copy() && step.depth == 0).expect("a copy");
            if let Body::Combine { into, .. } = Arc::make_mut(&mut step.body) {
                *into = BufferKind::Transit;
            }
        });
        assert!(error.contains("gets no result") || error.contains("missing"), "{error}");
    }

    #[test]
    fn ranks_that_wait_for_each_other_deadlock() {
        // Each of two ranks first waits for the other's message and then sends its own.
        let topology = Topology::from_names(&["a", "b"]);
        let plan = Plan::on(ring::plan(&topology), &topology, Lowering::Direct);
        let mut programs: Vec<Program> = (0..2).map(|rank| plan.program(rank, SPEC)).collect();
        for program in &mut programs {
            let step = reduction(program);
            program.steps.swap(0, step);
        }
        let error = SymbolicRun::new(&programs, &BTreeSet::new()).run(SPEC).expect_err("no rank sends first");
        assert!(error.starts_with("it deadlocks: rank 0 waits for "), "{error}");
    }
}
