//! The secret of a job: where it comes from, and the keys that are derived from it.
//!
//! Owns the settings' secret, its checks, and how it is combined with the secret of a unique id or of a node.
//!
//! A job without any secret uses the same keys and messages, but derived from the public name of the job.
//! They then prove nothing, except that two ranks mean the same job.

use super::launcher::RendezvousPoint;
use super::node_secret::{self, NodeSecret};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::named_file;
use crate::secret::SecretKey;
use crate::transport::credentials::ambiguous_user;
use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;

/// The shortest secret that is accepted, in bytes.
const MIN_BYTES: usize = 16;
/// The longest secret that is read from a file, in bytes.
const MAX_BYTES: u64 = 4096;

/// The secret that the ranks of a job share, for deriving keys. It cannot be printed or compared.
#[derive(Clone, Debug)]
pub struct JobSecret {
    key: SecretKey,
    is_secret: bool,
    is_encrypted: bool,
}

impl JobSecret {
    /// The key for one purpose of this job, which `label` and `parts` name. All ranks derive the same key.
    #[must_use]
    pub fn derive(&self, label: &str, parts: &[&[u8]]) -> SecretKey {
        self.key.derive(label, parts)
    }

    /// Whether only members of the job know the keys. Otherwise they are derived from the job's public name.
    #[must_use]
    pub fn is_secret(&self) -> bool {
        self.is_secret
    }

    /// Whether the connections of the job are encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }

    /// The secret of the world with this id, which ranks of the job open over their control connections.
    pub(super) fn of_world(&self, id: u128) -> Self {
        Self { key: self.key.derive("world", &[&id.to_le_bytes()]), ..*self }
    }

    pub(super) fn key(&self) -> &SecretKey {
        &self.key
    }
}

/// What the secret of a job consists of, besides the one that the settings give.
#[derive(Clone)]
enum SecondPart {
    /// Nothing.
    None,
    /// The random bytes of the job's unique id.
    UniqueId([u8; 16]),
    /// Random bytes that rank 0 hands to processes of its user on its node.
    Node(SecretKey),
    /// Those random bytes on the other ranks, which ask rank 0 for them under this name.
    AskedFrom(String),
}

/// From what a process derives the secret of its job.
#[derive(Clone)]
pub(super) struct SecretSource {
    /// The public number of the job.
    job: u128,
    given: Option<Vec<u8>>,
    second: SecondPart,
    is_encrypted: bool,
}

impl fmt::Debug for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecretSource").field("job", &self.job).finish_non_exhaustive()
    }
}

impl SecretSource {
    /// The secret of the job with the number `job` that meets at an address: the one that the settings give,
    /// if any.
    ///
    /// # Errors
    /// `InvalidSetting`, which does not quote the secret, if it is too short, or if its file cannot be used;
    /// also if the connections are to be encrypted without a secret.
    pub(super) fn of_settings(config: &Config, job: u128) -> Result<Self> {
        Self::new(config, job, SecondPart::None)
    }

    fn new(config: &Config, job: u128, second: SecondPart) -> Result<Self> {
        let source = Self { job, given: given(config)?, second, is_encrypted: config.tls.0 };
        if source.is_encrypted && !source.is_secret() {
            return Err(Error::invalid_setting(
                "FLEXRING_TLS=1 needs a secret of the job, without which the ranks would encrypt for any process that takes part: set \
                 FLEXRING_SECRET or FLEXRING_SECRET_FILE on all ranks, or let them meet by a unique id",
            ));
        }
        Ok(source)
    }

    /// The secret of the job of a unique id with the random bytes `token`.
    ///
    /// # Errors
    /// As for [`of_settings`](Self::of_settings).
    pub(super) fn of_id(config: &Config, job: u128, token: u128) -> Result<Self> {
        Self::new(config, job, SecondPart::UniqueId(token.to_le_bytes()))
    }

    /// The secret of a job whose ranks are all on this node, and which meets at `port`. If the settings give
    /// none, rank 0 draws one, and hands it to the others under the name that this returns with it.
    ///
    /// # Errors
    /// As for [`of_settings`](Self::of_settings); `InvalidSetting` if the kernel cannot tell this process's
    /// user from others; `System` if there are no random numbers.
    pub(super) fn of_node(
        config: &Config,
        job: u128,
        port: u16,
        is_rank_0: bool,
    ) -> Result<(Self, Option<NodeSecret>)> {
        if given(config)?.is_some() {
            return Ok((Self::of_settings(config, job)?, None));
        }
        if let Some(user) = ambiguous_user() {
            return Err(Error::invalid_setting(format!(
                "the ranks of this job, which has no FLEXRING_SECRET, cannot recognize each other: this process runs as {user} (fix: \
                 set FLEXRING_SECRET on all ranks)"
            )));
        }
        let name = node_secret::name(job, port);
        if !is_rank_0 {
            return Ok((Self::new(config, job, SecondPart::AskedFrom(name))?, None));
        }
        let key = SecretKey::random()?;
        let source = Self::new(config, job, SecondPart::Node(key.clone()))?;
        Ok((source, Some(NodeSecret { name, key })))
    }

    /// The secret of a job of one rank, which connects only to itself: it is encrypted only if the settings
    /// give a secret.
    ///
    /// # Errors
    /// As for [`of_settings`](Self::of_settings).
    pub(super) fn of_one_rank(config: &Config, job: u128) -> Result<Self> {
        let given = given(config)?;
        let is_encrypted = config.tls.0 && given.is_some();
        Ok(Self { job, given, second: SecondPart::None, is_encrypted })
    }

    /// The secret of a job that meets at `point`. If it has no id, `token` is its public number, and
    /// `one_node` says whether all its ranks are on this node. Rank 0 may have to hand a part of the secret
    /// to the others.
    ///
    /// # Errors
    /// As for [`of_node`](Self::of_node).
    pub(super) fn of_job(
        config: &Config,
        point: &RendezvousPoint,
        token: u128,
        one_node: bool,
        is_rank_0: bool,
    ) -> Result<(Self, Option<NodeSecret>)> {
        match point {
            RendezvousPoint::Id(id) => Ok((Self::of_id(config, id.job(), id.token())?, None)),
            RendezvousPoint::Address { port, .. } if one_node => {
                Self::of_node(config, token, *port, is_rank_0)
            }
            RendezvousPoint::Address { .. } => Ok((Self::of_settings(config, token)?, None)),
        }
    }

    /// The public number of the job.
    pub(super) fn job(&self) -> u128 {
        self.job
    }

    /// Whether only members of the job know its secret.
    pub(super) fn is_secret(&self) -> bool {
        self.given.is_some() || !matches!(self.second, SecondPart::None)
    }

    /// The secret. May wait for rank 0, at most a second.
    ///
    /// # Errors
    /// The cause, as a sentence, if rank 0 cannot be asked for it. A later attempt may succeed.
    pub(super) fn secret(&self) -> std::result::Result<JobSecret, String> {
        let (kind, second): (&str, Vec<u8>) = match &self.second {
            SecondPart::None => ("none", Vec::new()),
            SecondPart::UniqueId(token) => ("unique id", token.to_vec()),
            SecondPart::Node(key) => ("node", key.as_bytes().to_vec()),
            SecondPart::AskedFrom(name) => ("node", node_secret::ask(name)?.as_bytes().to_vec()),
        };
        let given = self.given.as_deref();
        let parts = [given.unwrap_or_default(), kind.as_bytes(), second.as_slice(), &self.job.to_le_bytes()];
        Ok(JobSecret {
            key: SecretKey::from_parts("job", &parts),
            is_secret: self.is_secret(),
            is_encrypted: self.is_encrypted,
        })
    }
}

/// Whether the settings give a secret that can be used, or none.
///
/// # Errors
/// `InvalidSetting` if it is too short, if its file cannot be used, or if there are two.
pub fn check_secret(config: &Config) -> Result<()> {
    given(config).map(drop)
}

/// The secret that the settings give.
fn given(config: &Config) -> Result<Option<Vec<u8>>> {
    let (name, secret) = match (&config.secret, &config.secret_file) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => {
            return Err(Error::invalid_setting(
                "FLEXRING_SECRET and FLEXRING_SECRET_FILE are both set: unset one of them",
            ));
        }
        (Some(text), None) => ("FLEXRING_SECRET".to_owned(), text.as_bytes().to_vec()),
        (None, Some(path)) => (format!("FLEXRING_SECRET_FILE=\"{path}\""), read(path)?),
    };
    if secret.len() < MIN_BYTES {
        return Err(Error::invalid_setting(format!(
            "{name} has {} bytes: a secret needs at least {MIN_BYTES} that cannot be guessed, for example from `openssl \
             rand -hex 32`",
            secret.len()
        )));
    }
    Ok(Some(secret))
}

/// The content of a secret's file, without the blanks around it.
fn read(path: &str) -> Result<Vec<u8>> {
    let refuse = |why: String| Error::invalid_setting(format!("FLEXRING_SECRET_FILE=\"{path}\" {why}"));
    let cannot_read = |cause: std::io::Error| refuse(format!("cannot be read: {cause}")).with_source(cause);
    let file = named_file::open(path.as_ref()).map_err(cannot_read)?;
    // Of the open file, so that it cannot be exchanged between check and use.
    let facts = file.metadata().map_err(cannot_read)?;
    let user = rustix::process::geteuid().as_raw();
    let mode = facts.mode() & 0o777;
    // A system that mounts secrets gives them to root and to the group of the process.
    let forbidden = match facts.uid() {
        owner if owner == user => 0o077,
        0 => 0o037,
        owner => {
            return Err(refuse(format!("belongs to user {owner}: it must belong to user {user} or to root")));
        }
    };
    if mode & forbidden != 0 {
        return Err(refuse(format!(
            "can be read by other users (its mode is {mode:03o}): allow only its owner to (`chmod 600`)"
        )));
    }
    let mut content = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut content).map_err(cannot_read)?;
    if content.len() as u64 > MAX_BYTES {
        return Err(refuse(format!("has more than {MAX_BYTES} bytes")));
    }
    Ok(content.trim_ascii().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{SecretText, Switch};
    use crate::error::ErrorKind;
    use std::os::unix::fs::PermissionsExt;

    const TEXT: &str = "0123456789abcdef-5ecret";

    fn with_text(text: &str) -> Config {
        Config { secret: Some(SecretText::new(text)), ..Config::default() }
    }

    fn with_file(path: &std::path::Path) -> Config {
        Config { secret_file: Some(path.display().to_string()), ..Config::default() }
    }

    fn code(source: &SecretSource) -> [u8; 32] {
        source.secret().expect("no rank to ask").key().mac("test", &[])
    }

    fn of_settings(config: &Config, job: u128) -> Result<SecretSource> {
        SecretSource::of_settings(config, job)
    }

    #[test]
    fn a_secret_is_the_same_from_the_variable_and_from_a_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        std::fs::write(&path, format!("{TEXT}\n")).expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("changed");
        let codes = [with_text(TEXT), with_file(&path)]
            .map(|config| code(&of_settings(&config, 1).expect("a secret")));
        assert!(codes[0] == codes[1]);
    }

    #[test]
    fn every_part_changes_the_keys() {
        let none = Config::default();
        let codes = [
            code(&of_settings(&none, 1).expect("no secret")),
            code(&of_settings(&none, 2).expect("no secret")),
            code(&of_settings(&with_text(TEXT), 1).expect("a secret")),
            code(&of_settings(&with_text("another secret text"), 1).expect("a secret")),
            code(&SecretSource::of_id(&none, 1, 7).expect("an id")),
            code(&SecretSource::of_id(&none, 1, 8).expect("an id")),
            code(&SecretSource::of_id(&with_text(TEXT), 1, 7).expect("an id")),
        ];
        for (index, one) in codes.iter().enumerate() {
            assert!(codes[..index].iter().all(|other| other != one), "code {index} repeats");
        }
    }

    #[test]
    fn a_source_does_not_show_its_secrets() {
        let source = SecretSource::of_id(&with_text(TEXT), 1, u128::from_le_bytes(*b"secretsecretsecr"))
            .expect("an id");
        assert_eq!(format!("{source:?}"), "SecretSource { job: 1, .. }");
    }

    #[test]
    fn only_a_job_name_is_no_secret() {
        let is_secret =
            |source: Result<SecretSource>| source.expect("valid").secret().expect("there").is_secret();
        assert!(!is_secret(of_settings(&Config::default(), 7)));
        assert!(is_secret(of_settings(&with_text(TEXT), 7)));
        assert!(is_secret(SecretSource::of_id(&Config::default(), 7, 1)));
        let (source, handed_out) = SecretSource::of_node(&Config::default(), 7, 4000, true).expect("drawn");
        assert!(handed_out.is_some() && source.secret().expect("drawn").is_secret());
        let (source, handed_out) = SecretSource::of_node(&with_text(TEXT), 7, 4000, true).expect("given");
        assert!(handed_out.is_none() && source.secret().expect("given").is_secret());
    }

    #[test]
    fn encryption_without_a_secret_is_refused() {
        let encrypted = |config: Config| Config { tls: Switch(true), ..config };
        let error = of_settings(&encrypted(Config::default()), 7).expect_err("no secret");
        assert_eq!(error.kind(), ErrorKind::InvalidSetting);
        assert!(
            error.message().contains("FLEXRING_TLS=1 needs a secret")
                && error.message().contains("FLEXRING_SECRET"),
            "{error}"
        );
        let is_encrypted =
            |source: Result<SecretSource>| source.expect("valid").secret().expect("there").is_encrypted();
        assert!(is_encrypted(of_settings(&encrypted(with_text(TEXT)), 7)));
        assert!(is_encrypted(SecretSource::of_one_rank(&encrypted(with_text(TEXT)), 7)));
        assert!(!is_encrypted(SecretSource::of_one_rank(&encrypted(Config::default()), 7)));
        assert!(is_encrypted(SecretSource::of_id(&encrypted(Config::default()), 7, 1)));
        let node = SecretSource::of_node(&encrypted(Config::default()), 7, 4000, true);
        assert!(is_encrypted(node.map(|(source, _)| source)));
        assert!(!is_encrypted(of_settings(&with_text(TEXT), 7)));
    }

    #[test]
    fn a_secret_that_others_can_read_is_refused_without_quoting_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        std::fs::write(&path, TEXT).expect("written");
        for mode in [0o644, 0o640, 0o602, 0o604] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("changed");
            let error = of_settings(&with_file(&path), 1).expect_err("readable by others");
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert!(
                error.message().contains("other users") && error.message().contains("chmod 600"),
                "{error}"
            );
            assert!(!error.message().contains("5ecret"), "{error}");
        }
    }

    #[test]
    fn unusable_secrets_are_refused_without_quoting_them() {
        let folder = tempfile::tempdir().expect("a folder");
        let long = folder.path().join("long");
        std::fs::write(&long, vec![b'x'; 5000]).expect("written");
        std::fs::set_permissions(&long, PermissionsExt::from_mode(0o600)).expect("changed");
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
            .expect("a pipe");
        let both = Config { secret: Some(SecretText::new(TEXT)), ..with_file(&long) };
        for (config, expected) in [
            (with_text("5ecret"), "has 6 bytes"),
            (both, "both set"),
            (with_file(&long), "more than 4096"),
            (with_file(&pipe), "it is a pipe and no regular file"),
            (with_file(folder.path()), "it is a folder and no regular file"),
            (with_file(&folder.path().join("missing")), "cannot be read"),
        ] {
            let error = of_settings(&config, 1).expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert!(error.message().contains(expected) && !error.message().contains("5ecret"), "{error}");
        }
    }
}
