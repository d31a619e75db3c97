//! Who may call worker, draft and admin services: callers that hold the pool's bearer secret.
//!
//! Owns reading the secret, attaching it to calls and comparing it in constant time. Refuses to know which services exist: servers wrap
//! each of theirs (default deny). Mutual TLS is the other way in: where the server's transport has verified a client certificate, it may be
//! built with [`Access::Verified`] instead.

use crate::convert::error_to_status;
use kvasir_core::{Error, Reason};
use std::fmt;
use std::sync::Arc;
use subtle::ConstantTimeEq as _;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// The pool's secret between its own components; never printed.
#[derive(Clone)]
pub struct BearerSecret(Arc<str>);

/// Why a secret cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SecretError {
    /// Too short to resist guessing.
    #[error("the bearer secret has {0} characters, at least {min} are needed", min = BearerSecret::LEN_MIN)]
    TooShort(usize),
    /// Could not be sent in a header.
    #[error("the bearer secret may hold visible ASCII characters only")]
    NotAscii,
}

/// How a server decides whether a caller may call.
#[derive(Clone, Debug)]
pub enum Access {
    /// The caller shows this secret.
    Bearer(BearerSecret),
    /// The transport has verified the caller's certificate.
    Verified,
}

/// Server side: lets a call pass or refuses it with `unauthenticated`.
#[derive(Clone, Debug)]
pub struct Guard(Access);

/// Client side: attaches the secret to each call.
#[derive(Clone)]
pub struct Credentials(MetadataValue<Ascii>);

const HEADER: &str = "authorization";
const SCHEME: &str = "bearer ";

// === impl BearerSecret ===

impl BearerSecret {
    /// Fewest characters.
    pub const LEN_MIN: usize = 16;

    /// Takes a secret as it stands in a file; white space around it does not count.
    pub fn new(text: &str) -> Result<Self, SecretError> {
        let secret = text.trim();
        if secret.len() < Self::LEN_MIN {
            return Err(SecretError::TooShort(secret.len()));
        }
        if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(SecretError::NotAscii);
        }
        Ok(Self(secret.into()))
    }

    /// Whether `shown` is the secret; takes the same time wherever they differ.
    pub fn matches(&self, shown: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(shown).into()
    }
}

impl fmt::Debug for BearerSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BearerSecret(..)")
    }
}

// === impl SecretError ===

impl SecretError {
    /// The public word for this failure.
    pub fn reason(&self) -> Reason {
        match self {
            Self::TooShort(_) | Self::NotAscii => Reason::InvalidArgument,
        }
    }
}

// === impl Guard ===

impl Guard {
    /// A guard for one server.
    pub fn new(access: Access) -> Self {
        Self(access)
    }

    /// Checks the value of an `authorization` header.
    pub fn check(&self, header: Option<&[u8]>) -> Result<(), Error> {
        let secret = match &self.0 {
            Access::Verified => return Ok(()),
            Access::Bearer(secret) => secret,
        };
        let Some(header) = header else {
            return Err(refusal("no authorization header; send `authorization: Bearer` with the pool's secret"));
        };
        let (scheme, shown) = header.split_at_checked(SCHEME.len()).unwrap_or((header, &[]));
        if !scheme.eq_ignore_ascii_case(SCHEME.as_bytes()) {
            return Err(refusal("the authorization header is not of the form `Bearer <secret>`"));
        }
        if secret.matches(shown) { Ok(()) } else { Err(refusal("the bearer secret is not this pool's")) }
    }
}

fn refusal(message: &str) -> Error {
    Error::new(Reason::Unauthenticated, message)
}

impl Interceptor for Guard {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let header = request.metadata().get(HEADER).map(|value| value.as_encoded_bytes().to_vec());
        self.check(header.as_deref()).map_err(|error| error_to_status(&error))?;
        Ok(request)
    }
}

// === impl Credentials ===

impl Credentials {
    /// Credentials that show `secret`.
    pub fn new(secret: &BearerSecret) -> Result<Self, SecretError> {
        let mut value = MetadataValue::try_from(format!("Bearer {}", secret.0)).map_err(|_| SecretError::NotAscii)?;
        value.set_sensitive(true);
        Ok(Self(value))
    }
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(HEADER, self.0.clone());
        Ok(request)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(..)")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
    use super::*;

    const SECRET: &str = "0123456789abcdef";

    fn guard() -> Guard {
        Guard::new(Access::Bearer(BearerSecret::new(SECRET).unwrap()))
    }

    #[test]
    fn only_the_secret_itself_opens() {
        let guard = guard();
        assert_eq!(guard.check(Some(format!("Bearer {SECRET}").as_bytes())), Ok(()));
        assert_eq!(guard.check(Some(format!("bearer {SECRET}").as_bytes())), Ok(()));
        for wrong in
            ["", "Bearer", "Bearer ", "Basic 0123456789abcdef", SECRET, "Bearer 0123456789abcdeF", "Bearer 0123456789abcdef0"]
        {
            let error = guard.check(Some(wrong.as_bytes())).unwrap_err();
            assert_eq!(error.reason, Reason::Unauthenticated, "{wrong}");
        }
        assert_eq!(guard.check(None).unwrap_err().reason, Reason::Unauthenticated);
    }

    #[test]
    fn credentials_open_their_guard_and_are_never_printed() {
        let secret = BearerSecret::new(&format!("  {SECRET}\n")).unwrap();
        let mut credentials = Credentials::new(&secret).unwrap();
        let request = credentials.call(Request::new(())).unwrap();
        assert!(guard().call(request).is_ok());
        let status = guard().call(Request::new(())).unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unauthenticated);
        for text in [format!("{secret:?}"), format!("{credentials:?}"), format!("{:?}", guard())] {
            assert!(!text.contains(SECRET), "{text}");
        }
    }

    #[test]
    fn a_weak_secret_is_refused() {
        assert_eq!(BearerSecret::new("short").unwrap_err(), SecretError::TooShort(5));
        assert_eq!(BearerSecret::new("0123456789 abcdef").unwrap_err(), SecretError::NotAscii);
    }
}
