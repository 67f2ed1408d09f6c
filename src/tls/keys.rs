//! The key of this process, and the parameters of all sessions.
//!
//! Owns the choice of algorithms.

use crate::error::{Error, Result};
use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{ClientConfig, DigitallySignedStruct, PeerMisbehaved, ServerConfig, SignatureScheme};
use std::sync::{Arc, OnceLock};

/// The parameters of all sessions of this process.
pub(super) struct TlsKeys {
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
}

/// The parameters of all sessions of this process. The first call draws the key.
///
/// # Errors
/// `System` if there are no random numbers.
pub(super) fn of_this_process() -> Result<&'static TlsKeys> {
    static KEYS: OnceLock<TlsKeys> = OnceLock::new();
    if let Some(keys) = KEYS.get() {
        return Ok(keys);
    }
    let drawn = draw().map_err(|cause| Error::system(format!("cannot prepare encryption: {cause}")))?;
    Ok(KEYS.get_or_init(|| drawn))
}

fn draw() -> std::result::Result<TlsKeys, rustls::Error> {
    let provider = Arc::new(algorithms());
    let no_random = |_| rustls::Error::FailedToGetRandomBytes;
    let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(no_random)?;
    let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(key.as_ref()))?;
    let public = key.public_key().ok_or(rustls::Error::General("a key has no public part".to_owned()))?;
    let certified = CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key);
    let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(certified))));
    // Sessions are not resumed.
    server.send_tls13_tickets = 0;
    let verifier = AnyKey { provider: Arc::clone(&provider) };
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    client.resumption = Resumption::disabled();
    client.enable_sni = false;
    Ok(TlsKeys { client: Arc::new(client), server: Arc::new(server) })
}

/// The algorithms of this build. The order is the preference: most processors have instructions for AES.
fn algorithms() -> CryptoProvider {
    use provider::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    CryptoProvider {
        cipher_suites: vec![
            TLS13_AES_128_GCM_SHA256,
            TLS13_AES_256_GCM_SHA384,
            TLS13_CHACHA20_POLY1305_SHA256,
        ],
        kx_groups: vec![provider::kx_group::X25519],
        ..provider::default_provider()
    }
}

/// Accepts the key of any server that proves to have it. The codes over the session's binding tell whose it
/// is.
#[derive(Debug)]
struct AnyKey {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _key: &CertificateDer<'_>,
        _others: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        let schemes = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, signature, schemes)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
