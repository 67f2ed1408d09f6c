//! How a rank and its coordinator prove to each other that they belong to one job, without I/O.
//!
//! Owns the order of the messages, what the codes authenticate, and why a caller is refused.
//!
//! | | from | message | contains |
//! |---|---|---|---|
//! | 1 | rank | [`Opening`] | the job's public number, what the rank says about itself, a nonce |
//! | 2 | coordinator | [`ToRank::Challenge`] | a nonce |
//! | 3 | rank | proof | a code over 1, 2 and the rank's parameters; the parameters |
//! | 4 | coordinator | [`ToRank::HelloAck`] | a code over all of this |
//!
//! If the job is encrypted, messages 3 and 4 and all later ones are, and the codes also cover the binding of
//! the encryption: a process in the middle that decrypts them has another binding with each end. Message 1
//! says whether its sender encrypts. The codes cover it too, so an attacker who changes it is detected.
//!
//! The keys of the codes are derived from the job's secret. Both nonces are new for each connection, so
//! recorded messages are of no use later. The rank proves itself first: a stranger that calls gets no code
//! from which it could try to guess a secret. Until message 3 is verified, whatever the caller sends concerns
//! this caller alone.

use super::frame_decoder::Preamble;
use super::protocol::{
    Bytes, Hello, HelloHeader, HelloParams, Nonce, Opening, Purpose, ToRank, VERSION, WIRE_VERSION, decode,
    encode_value, frame_of,
};
use super::secret::JobSecret;
use crate::error::{Error, Result};
use crate::secret::{AuthenticationCode, MAC_BYTES, random_bytes};
use crate::tls::INTERCEPTOR;

const FROM_RANK: &str = "control connection, rank";
const FROM_COORDINATOR: &str = "control connection, coordinator";

/// The job whose ranks a coordinator admits.
#[derive(Debug)]
pub(super) struct Gate {
    /// The public number of the job.
    pub(super) job: u128,
    pub(super) secret: JobSecret,
    /// Where the ranks rendezvous, for messages.
    pub(super) location: String,
}

/// The coordinator's side of one handshake.
#[derive(Debug)]
pub(super) enum Admission {
    /// No message has arrived.
    AwaitOpening,
    /// The opening has arrived and the challenge is sent.
    AwaitProof {
        /// The encoded opening, and its content.
        frame: Vec<u8>,
        opening: Box<Opening>,
        nonce: Nonce,
    },
}

/// What follows from a message of a caller.
#[derive(Debug)]
pub(super) enum AdmissionStep {
    /// The handshake goes on with this answer.
    Continue(Admission, ToRank),
    /// The caller belongs to the job. This answer proves that the coordinator does, too.
    Admitted(Hello, ToRank),
    /// The caller is not admitted. It gets the error; the text describes it to the ranks that wait.
    Refused(Error, String),
    /// The caller asks which process listens, and wants no more. The text describes it to the ranks that
    /// wait.
    WhoListens { claim: String, is_of_this_job: bool },
    /// The caller does not speak the protocol.
    Malformed,
}

impl Admission {
    /// Handles a frame of a caller. `binding` is that of its connection, which a proof must have.
    pub(super) fn on_frame(self, gate: &Gate, frame: Vec<u8>, binding: Option<&[u8]>) -> AdmissionStep {
        match self {
            Self::AwaitOpening => on_opening(gate, frame),
            Self::AwaitProof { frame: opened, opening, nonce } => match binding {
                Some(binding) => on_proof(gate, *opening, &[&opened, &nonce, binding], &frame),
                None => AdmissionStep::Malformed,
            },
        }
    }
}

fn on_opening(gate: &Gate, frame: Vec<u8>) -> AdmissionStep {
    let Some(opening) = decode::<Opening>(&frame) else {
        return AdmissionStep::Malformed;
    };
    let HelloHeader { purpose, .. } = opening.header;
    let (sender, claim) = (opening.header.sender(), opening.header.claim());
    if purpose == Purpose::WhoListens {
        return AdmissionStep::WhoListens { claim, is_of_this_job: opening.job == gate.job };
    }
    let is_rank = purpose == Purpose::Join;
    if opening.job != gate.job {
        let fix = if is_rank {
            "give each job a port of its own with FLEXRING_MASTER_PORT, and start all ranks of a job by the same launcher"
        } else {
            "ask with the variables that the job's ranks have from their launcher"
        };
        let error = Error::rendezvous(format!(
            "the rendezvous at {} belongs to another job than {sender}: {fix}",
            gate.location
        ));
        return AdmissionStep::Refused(error, "belongs to another job".to_owned());
    }
    if opening.has_secret != gate.secret.is_secret() {
        let (theirs, ours) = if opening.has_secret { ("a", "none") } else { ("no", "one") };
        let place = if is_rank { "on all ranks or on none" } else { "as on the ranks" };
        let error = Error::rendezvous(format!(
            "{sender} has {theirs} job secret, and the rendezvous at {} has {ours}: set FLEXRING_SECRET or \
             FLEXRING_SECRET_FILE {place}",
            gate.location
        ));
        return AdmissionStep::Refused(error, format!("{claim} and has {theirs} job secret"));
    }
    if opening.is_encrypted != gate.secret.is_encrypted() {
        let (theirs, ours) = if opening.is_encrypted {
            ("has FLEXRING_TLS=1", "has not")
        } else {
            ("has not FLEXRING_TLS=1", "has")
        };
        let place = if is_rank { "alike on all ranks" } else { "as on the ranks" };
        let error = Error::rendezvous(format!(
            "{sender} {theirs} and the coordinator at {} {ours}: set it {place}",
            gate.location
        ));
        return AdmissionStep::Refused(error, format!("{claim} and {theirs}, which rank 0 {ours}"));
    }
    let Ok(nonce) = random_bytes() else {
        return AdmissionStep::Malformed;
    };
    let admission = Admission::AwaitProof { frame, opening: Box::new(opening), nonce };
    AdmissionStep::Continue(admission, ToRank::Challenge(nonce))
}

/// Handles a proof, which covers the opening, the nonce and the binding in `before`.
fn on_proof(gate: &Gate, opening: Opening, before: &[&[u8]; 3], frame: &[u8]) -> AdmissionStep {
    let Some((code, params)) = frame.split_first_chunk::<MAC_BYTES>() else {
        return AdmissionStep::Malformed;
    };
    let key = gate.secret.key();
    let Opening { header, .. } = opening;
    let [opened, nonce, binding] = before;
    if !key.verify(FROM_RANK, &[&WIRE_VERSION.to_le_bytes(), opened, nonce, binding, params], code) {
        let interceptor = if gate.secret.is_encrypted() { INTERCEPTOR } else { "" };
        let error = Error::rendezvous(format!(
            "{} does not know the secret of the job that meets at {}: FLEXRING_SECRET or FLEXRING_SECRET_FILE must have the \
             same content on all ranks, and a unique id must come unchanged from the process that created it{interceptor}",
            header.sender(),
            gate.location
        ));
        let note = format!("{} and does not know the job's secret{interceptor}", header.claim());
        return AdmissionStep::Refused(error, note);
    }
    let params = if *header.version == *VERSION {
        let Some(params) = HelloParams::decode(params) else {
            return AdmissionStep::Malformed;
        };
        Some(params)
    } else {
        None
    };
    let answer = key.mac(FROM_COORDINATOR, &[&WIRE_VERSION.to_le_bytes(), opened, nonce, binding, code]);
    AdmissionStep::Admitted(Hello { header, params }, ToRank::HelloAck(answer))
}

/// The code by which a rank proves itself: over its encoded opening, the coordinator's nonce and the
/// connection's binding, which are `before`, and its encoded parameters.
pub(super) fn code_of_rank(secret: &JobSecret, before: &[&[u8]; 3], params: &[u8]) -> AuthenticationCode {
    let [opened, nonce, binding] = before;
    secret.key().mac(FROM_RANK, &[&WIRE_VERSION.to_le_bytes(), opened, nonce, binding, params])
}

/// The rank's side of one handshake.
#[derive(Debug)]
pub(super) struct Applicant<'a> {
    secret: &'a JobSecret,
    /// The encoded opening.
    opened: Vec<u8>,
    /// The coordinator's nonce, the binding of the connection, and the code that was sent in answer.
    proved: Option<(Nonce, Vec<u8>, AuthenticationCode)>,
}

impl<'a> Applicant<'a> {
    /// Begins a handshake. Returns the first bytes to send as well.
    ///
    /// # Errors
    /// `System` if there are no random numbers.
    pub(super) fn new(secret: &'a JobSecret, job: u128, header: &HelloHeader) -> Result<(Self, Bytes)> {
        let opening = Opening {
            job,
            has_secret: secret.is_secret(),
            is_encrypted: secret.is_encrypted(),
            nonce: random_bytes()?,
            header: header.clone(),
        };
        let opened = encode_value(&opening)?;
        let frame = frame_of([[0; 4].as_slice(), &opened].concat())?;
        let bytes = [Preamble::encode().as_slice(), &frame].concat();
        Ok((Self { secret, opened, proved: None }, bytes.into()))
    }

    /// Whether the connection must be encrypted before the proof.
    pub(super) fn is_encrypted(&self) -> bool {
        self.secret.is_encrypted()
    }

    /// Whether a challenge has been answered.
    pub(super) fn has_proved(&self) -> bool {
        self.proved.is_some()
    }

    /// Answers a challenge on the connection with this binding. Returns the bytes to send.
    ///
    /// # Errors
    /// `Internal` if there was a challenge before, or if the parameters are too long.
    pub(super) fn prove(&mut self, nonce: Nonce, binding: &[u8], params: &HelloParams) -> Result<Bytes> {
        if self.proved.is_some() {
            return Err(Error::internal("a coordinator sent two challenges"));
        }
        let params = encode_value(params)?;
        let code = code_of_rank(self.secret, &[&self.opened, &nonce, binding], &params);
        self.proved = Some((nonce, binding.to_vec(), code));
        frame_of([[0; 4].as_slice(), &code, &params].concat())
    }

    /// Whether this code proves that its sender is the coordinator of the job.
    pub(super) fn is_proof(&self, code: &AuthenticationCode) -> bool {
        self.proved.as_ref().is_some_and(|(nonce, binding, mine)| {
            let parts = [&WIRE_VERSION.to_le_bytes(), self.opened.as_slice(), nonce, binding, mine];
            self.secret.key().verify(FROM_COORDINATOR, &parts, code)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::process::Process;
    use super::super::secret::SecretSource;
    use super::*;
    use crate::config::{Config, SecretText, Switch};

    const JOB: u128 = 7;

    fn secret(text: Option<&str>) -> JobSecret {
        let config = Config { secret: text.map(SecretText::new), ..Config::default() };
        SecretSource::of_settings(&config, JOB).expect("valid").secret().expect("there")
    }

    fn gate(text: Option<&str>) -> Gate {
        Gate { job: JOB, secret: secret(text), location: "here:1".to_owned() }
    }

    fn header() -> HelloHeader {
        HelloHeader {
            version: VERSION.into(),
            rank: 1,
            world: 2,
            process: Process::example(1),
            purpose: Purpose::Join,
        }
    }

    /// The frame in the bytes that a rank sends, without preamble and length.
    fn frame(bytes: &[u8]) -> Vec<u8> {
        let begin = if bytes.starts_with(b"flexring") { Preamble::encode().len() } else { 0 };
        bytes[begin + 4..].to_vec()
    }

    /// Runs the first half: the opening and its challenge.
    fn challenge(gate: &Gate, bytes: &[u8]) -> (Admission, Nonce) {
        match Admission::AwaitOpening.on_frame(gate, frame(bytes), Some(&[])) {
            AdmissionStep::Continue(admission, ToRank::Challenge(nonce)) => (admission, nonce),
            other => panic!("{other:?} instead of a challenge"),
        }
    }

    fn refusal(step: AdmissionStep) -> (String, String) {
        match step {
            AdmissionStep::Refused(error, note) => (error.message().to_owned(), note),
            other => panic!("{other:?} instead of a refusal"),
        }
    }

    const TEXT: Option<&str> = Some("0123456789abcdef");

    #[test]
    fn both_ends_prove_that_they_know_the_secret() {
        for text in [TEXT, None] {
            let (gate, secret) = (gate(text), secret(text));
            let (mut rank, bytes) = Applicant::new(&secret, JOB, &header()).expect("random bytes");
            let (admission, nonce) = challenge(&gate, &bytes);
            let proof = rank.prove(nonce, &[], &HelloParams::example()).expect("short");
            let AdmissionStep::Admitted(hello, ToRank::HelloAck(code)) =
                admission.on_frame(&gate, frame(&proof), Some(&[]))
            else {
                panic!("not admitted");
            };
            assert_eq!(hello, Hello { header: header(), params: Some(HelloParams::example()) });
            assert!(rank.is_proof(&code));
            let forged = std::array::from_fn(|at| code[at] ^ u8::from(at == 31));
            assert!(!rank.is_proof(&forged));
        }
    }

    #[test]
    fn a_wrong_secret_is_refused_by_name() {
        let (gate, wrong) = (gate(TEXT), secret(Some("another secret text")));
        let (mut rank, bytes) = Applicant::new(&wrong, JOB, &header()).expect("random bytes");
        let (admission, nonce) = challenge(&gate, &bytes);
        let proof = rank.prove(nonce, &[], &HelloParams::example()).expect("short");
        let (error, note) = refusal(admission.on_frame(&gate, frame(&proof), Some(&[])));
        assert!(
            error.starts_with("rank 1 (pid 101 on host h) does not know the secret of the job"),
            "{error}"
        );
        assert!(note.contains("claims rank 1"), "{note}");
    }

    #[test]
    fn a_secret_on_one_side_only_is_refused_by_name() {
        for (ours, theirs, expected) in [(TEXT, None, "has no job secret"), (None, TEXT, "has a job secret")]
        {
            let (gate, secret) = (gate(ours), secret(theirs));
            let (_, bytes) = Applicant::new(&secret, JOB, &header()).expect("random bytes");
            let (error, _) = refusal(Admission::AwaitOpening.on_frame(&gate, frame(&bytes), Some(&[])));
            assert!(error.contains(expected) && error.contains("FLEXRING_SECRET"), "{error}");
        }
    }

    fn encrypted(text: &str) -> JobSecret {
        let config = Config { secret: Some(SecretText::new(text)), tls: Switch(true), ..Config::default() };
        SecretSource::of_settings(&config, JOB).expect("valid").secret().expect("there")
    }

    #[test]
    fn encryption_on_one_side_only_is_refused_by_name() {
        let [plain, encrypted] = [secret(TEXT), encrypted("0123456789abcdef")];
        for (ours, theirs, expected) in [
            (
                &plain,
                &encrypted,
                "rank 1 (pid 101 on host h) has FLEXRING_TLS=1 and the coordinator at here:1 has not: set it",
            ),
            (
                &encrypted,
                &plain,
                "rank 1 (pid 101 on host h) has not FLEXRING_TLS=1 and the coordinator at here:1 has: set it",
            ),
        ] {
            let gate = Gate { secret: ours.clone(), ..gate(TEXT) };
            let (_, bytes) = Applicant::new(theirs, JOB, &header()).expect("random bytes");
            let (error, note) = refusal(Admission::AwaitOpening.on_frame(&gate, frame(&bytes), Some(&[])));
            assert!(error.starts_with(expected), "{error}");
            assert!(note.contains("claims rank 1 and has") && note.contains("FLEXRING_TLS=1"), "{note}");
        }
    }

    #[test]
    fn codes_cover_the_binding_of_the_encryption() {
        let secret = encrypted("0123456789abcdef");
        let gate = Gate { secret: secret.clone(), ..gate(TEXT) };
        let (mut rank, bytes) = Applicant::new(&secret, JOB, &header()).expect("random bytes");
        let (ours, theirs) = ([1; 32].as_slice(), [2; 32].as_slice());
        let (admission, nonce) = challenge(&gate, &bytes);
        let proof = frame(&rank.prove(nonce, ours, &HelloParams::example()).expect("short"));
        let Admission::AwaitProof { frame: opened, opening, nonce } = admission else {
            panic!("no challenge");
        };
        let again = || Admission::AwaitProof { frame: opened.clone(), opening: opening.clone(), nonce };
        let (error, note) = refusal(again().on_frame(&gate, proof.clone(), Some(theirs)));
        assert!(error.contains("intercepts the encryption") && note.contains("intercepts"), "{error}");
        // A proof that was not encrypted.
        assert!(matches!(again().on_frame(&gate, proof.clone(), None), AdmissionStep::Malformed));
        let AdmissionStep::Admitted(_, ToRank::HelloAck(code)) = again().on_frame(&gate, proof, Some(ours))
        else {
            panic!("not admitted");
        };
        assert!(rank.is_proof(&code));
    }

    #[test]
    fn another_job_is_refused_by_name() {
        let (gate, secret) = (gate(TEXT), secret(TEXT));
        let (_, bytes) = Applicant::new(&secret, JOB + 1, &header()).expect("random bytes");
        let (error, _) = refusal(Admission::AwaitOpening.on_frame(&gate, frame(&bytes), Some(&[])));
        assert!(error.contains("here:1 belongs to another job than rank 1"), "{error}");
    }

    #[test]
    fn recorded_messages_are_refused() {
        let (gate, secret) = (gate(TEXT), secret(TEXT));
        let (mut rank, bytes) = Applicant::new(&secret, JOB, &header()).expect("random bytes");
        let (_, nonce) = challenge(&gate, &bytes);
        let proof = rank.prove(nonce, &[], &HelloParams::example()).expect("short");
        // The coordinator's nonce is another one.
        let (admission, other) = challenge(&gate, &bytes);
        assert_ne!(nonce, other);
        refusal(admission.on_frame(&gate, frame(&proof), Some(&[])));
    }

    #[test]
    fn every_byte_of_a_proof_and_its_parameters_counts() {
        let (gate, secret) = (gate(TEXT), secret(TEXT));
        let (mut rank, bytes) = Applicant::new(&secret, JOB, &header()).expect("random bytes");
        let (admission, nonce) = challenge(&gate, &bytes);
        let proof = frame(&rank.prove(nonce, &[], &HelloParams::example()).expect("short"));
        let Admission::AwaitProof { frame: opened, opening, nonce } = admission else {
            panic!("no challenge");
        };
        for at in 0..proof.len() {
            let admission = Admission::AwaitProof { frame: opened.clone(), opening: opening.clone(), nonce };
            let mut damaged = proof.clone();
            damaged[at] ^= 1;
            refusal(admission.on_frame(&gate, damaged, Some(&[])));
        }
        let mut claimed = *opening;
        claimed.header.rank = 0;
        let frame = encode_value(&claimed).expect("short");
        let admission = Admission::AwaitProof { frame, opening: Box::new(claimed), nonce };
        refusal(admission.on_frame(&gate, proof, Some(&[])));
    }

    #[test]
    fn the_code_of_a_rank_is_no_code_of_a_coordinator() {
        let secret = secret(TEXT);
        let (mut rank, _) = Applicant::new(&secret, JOB, &header()).expect("random bytes");
        assert!(!rank.is_proof(&[0; MAC_BYTES]), "before the challenge");
        let proof = frame(&rank.prove([1; 16], &[], &HelloParams::example()).expect("short"));
        assert!(!rank.is_proof(proof.first_chunk().expect("a code")));
        assert!(rank.prove([2; 16], &[], &HelloParams::example()).is_err(), "a second challenge");
    }

    #[test]
    fn another_release_is_admitted_without_its_parameters() {
        let (gate, secret) = (gate(TEXT), secret(TEXT));
        let header = HelloHeader { version: "99.0".into(), ..header() };
        let (mut rank, bytes) = Applicant::new(&secret, JOB, &header).expect("random bytes");
        let (admission, nonce) = challenge(&gate, &bytes);
        let proof = rank.prove(nonce, &[], &HelloParams::example()).expect("short");
        match admission.on_frame(&gate, frame(&proof), Some(&[])) {
            AdmissionStep::Admitted(hello, _) => assert_eq!(hello, Hello { header, params: None }),
            other => panic!("{other:?}"),
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_refused_without_panicking(opening: Vec<u8>, proof: Vec<u8>) {
            let (gate, secret) = (gate(TEXT), secret(TEXT));
            let step = Admission::AwaitOpening.on_frame(&gate, opening, Some(&[]));
            proptest::prop_assert!(!matches!(step, AdmissionStep::Admitted(..)));
            let (_, bytes) = Applicant::new(&secret, JOB, &header()).expect("random bytes");
            let step = challenge(&gate, &bytes).0.on_frame(&gate, proof, Some(&[]));
            proptest::prop_assert!(matches!(step, AdmissionStep::Refused(..) | AdmissionStep::Malformed));
        }
    }
}
