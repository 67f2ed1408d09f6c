//! Which launcher counts, if the variables of several are set.
//!
//! Owns the rules by which one launcher may start another. Must not know how their variables are read.
//!
//! - A launcher whose variables cannot be used, because one is missing for example, is skipped if those of another can: batch scripts export
//!   `WORLD_SIZE` for other programs.
//! - torchrun may run within mpirun or srun, and mpirun within srun, which starts mpirun's daemons. The inner one counts.
//! - A launcher that started a single process says nothing about the ranks which that process starts.
//! - Otherwise all must give the same rank and world size. Variables that are left over in a shell do not.

use super::variables::{Environment, LauncherInfo, NumericVariable, mpich, open_mpi, slurm, torchrun};
use crate::error::{Error, Result};

/// The launchers whose variables are complete, the innermost first.
///
/// # Errors
/// `InvalidSetting`, about the first one whose variables cannot be used, if there is no other.
pub(super) fn complete_launchers(environment: &Environment<'_>) -> Result<Vec<LauncherInfo>> {
    let mut complete = Vec::new();
    let mut unusable = None;
    for launcher in [torchrun, open_mpi, mpich, slurm] {
        match launcher(environment) {
            Ok(info) => complete.extend(info),
            Err(error) => unusable = unusable.or(Some(error)),
        }
    }
    match unusable {
        Some(error) if complete.is_empty() => Err(error),
        _ => Ok(complete),
    }
}

/// The launcher that started this process, if it is a known one.
///
/// # Errors
/// `InvalidSetting`, with the variables, if launchers give different ranks or world sizes and one did not start the other.
pub(in crate::bootstrap) fn detect_launcher(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    let mut launchers = complete_launchers(environment)?.into_iter();
    let Some(inner) = launchers.next() else {
        return Ok(None);
    };
    let mut outer: Vec<LauncherInfo> = launchers.collect();
    if outer.iter().chain([&inner]).any(|launcher| launcher.is_mpi) {
        // srun starts the daemons of mpirun, or one program that is not a rank.
        outer.retain(|launcher| launcher.is_mpi);
    }
    match outer.iter().find(|outer| contradicts(environment, &inner, outer)) {
        Some(outer) => Err(contradiction(&inner, outer)),
        None => Ok(Some(inner)),
    }
}

/// Whether a process cannot be a rank of both.
fn contradicts(environment: &Environment<'_>, inner: &LauncherInfo, outer: &LauncherInfo) -> bool {
    let (rank, world) = (inner.rank.value, inner.world.value);
    let is_equal = rank == outer.rank.value && world == outer.world.value;
    !(is_equal || outer.world.value == 1 || is_within(environment, inner, outer))
}

/// Whether `outer` started an agent of torchrun, or of a launcher like it, on each node, and the agent this rank.
fn is_within(environment: &Environment<'_>, inner: &LauncherInfo, outer: &LauncherInfo) -> bool {
    if inner.launcher != "torchrun" {
        return false;
    }
    // Only torchrun itself sets it. Its agents may number the nodes in another order.
    if environment.text("TORCHELASTIC_RUN_ID").is_some() {
        return true;
    }
    let Ok(Some(local)) = environment.number(inner.local) else {
        return false;
    };
    // The agents of others, such as DeepSpeed, number the ranks of the first node first.
    let per_agent = inner.world.value / outer.world.value.max(1);
    let first = outer.rank.value.checked_mul(per_agent);
    per_agent > 1
        && per_agent * outer.world.value == inner.world.value
        && local.value < per_agent
        && first.and_then(|first| first.checked_add(local.value)) == Some(inner.rank.value)
}

fn contradiction(inner: &LauncherInfo, outer: &LauncherInfo) -> Error {
    let variables = |launcher: &LauncherInfo| format!("{} {}", launcher.rank, launcher.world);
    let names = |launcher: &LauncherInfo| format!("{} {}", launcher.rank.name, launcher.world.name);
    Error::invalid_setting(format!(
        "{}, as {} sets them, contradict {} of {}: unset those that are left over from another job (unset {}, or unset {}), or set \
         FLEXRING_RANK and FLEXRING_WORLD_SIZE",
        variables(inner),
        inner.launcher,
        variables(outer),
        outer.launcher,
        names(inner),
        names(outer),
    ))
}

/// A warning, if this process is the only rank of its world, but a launcher that started several processes started it as its first
/// one.
pub(super) fn alone_among_several(environment: &Environment<'_>, world: NumericVariable) -> Option<String> {
    let several = complete_launchers(environment).unwrap_or_default();
    let several = several.iter().find(|outer| outer.world.value > 1 && outer.rank.value == 0)?;
    (world.value == 1).then(|| {
        format!(
            "{} started {} processes ({}), but {world} makes each of them the only rank of a world of its own: unset {} if they \
             are to be one world",
            several.launcher, several.world.value, several.world, world.name
        )
    })
}

#[cfg(test)]
mod tests;
