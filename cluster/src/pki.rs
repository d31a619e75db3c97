//! Certificates of one cluster: an authority, a front-proxy authority, a service-account key, and a pair per component or user.
//!
//! Keys lie in files that only the owner can read. Made fresh at each start; nothing outlives the cluster.

use crate::Error;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The authority that every component trusts.
pub(crate) struct Pki {
    dir: PathBuf,
    ca: CertifiedIssuer<'static, KeyPair>,
}

/// Where a certificate and its key lie.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
}

// === impl Pki ===

impl Pki {
    /// Makes the authorities and the service-account key under `dir`.
    pub(crate) fn create(dir: &Path) -> Result<Self, Error> {
        fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        let ca = authority("kvasir-cluster")?;
        write(&dir.join("ca.crt"), &ca.pem())?;
        write(&dir.join("ca.key"), &ca.key().serialize_pem())?;
        let front = authority("kvasir-front-proxy")?;
        write(&dir.join("front-proxy-ca.crt"), &front.pem())?;
        let pki = Self { dir: dir.to_owned(), ca };
        pki.signed_by(&front, "front-proxy-client", "front-proxy-client", None, &[])?;
        let accounts = generate("service accounts")?;
        write(&dir.join("sa.key"), &accounts.serialize_pem())?;
        write(&dir.join("sa.pub"), &accounts.public_key_pem())?;
        Ok(pki)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(crate) fn ca(&self) -> PathBuf {
        self.path("ca.crt")
    }

    /// A client certificate: Kubernetes reads the user from the common name and the group from the organisation.
    pub(crate) fn client(&self, file: &str, user: &str, group: Option<&str>) -> Result<Pair, Error> {
        self.signed_by(&self.ca, file, user, group, &[])
    }

    /// A server certificate for these names and addresses.
    pub(crate) fn server(&self, file: &str, user: &str, names: &[String]) -> Result<Pair, Error> {
        self.signed_by(&self.ca, file, user, None, names)
    }

    fn signed_by(
        &self,
        issuer: &CertifiedIssuer<'static, KeyPair>,
        file: &str,
        user: &str,
        group: Option<&str>,
        names: &[String],
    ) -> Result<Pair, Error> {
        let explain = |source| Error::Certificate { subject: user.to_owned(), source };
        let key = generate(user)?;
        let mut params = CertificateParams::new(names).map_err(explain)?;
        params.distinguished_name = name(user, group);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let cert = params.signed_by(&key, issuer).map_err(explain)?;
        let pair = Pair { cert: self.path(&format!("{file}.crt")), key: self.path(&format!("{file}.key")) };
        write(&pair.cert, &cert.pem())?;
        write(&pair.key, &key.serialize_pem())?;
        Ok(pair)
    }
}

fn authority(common_name: &str) -> Result<CertifiedIssuer<'static, KeyPair>, Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = name(common_name, None);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::CrlSign];
    CertifiedIssuer::self_signed(params, generate(common_name)?)
        .map_err(|source| Error::Certificate { subject: common_name.to_owned(), source })
}

fn generate(subject: &str) -> Result<KeyPair, Error> {
    KeyPair::generate().map_err(|source| Error::Certificate { subject: subject.to_owned(), source })
}

fn name(common_name: &str, organisation: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    if let Some(organisation) = organisation {
        name.push(DnType::OrganizationName, organisation);
    }
    name
}

/// Writes a file that only its owner can read.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn keys_are_for_the_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let pair = pki.client("alice", "alice", Some("tenants")).unwrap();
        for key in [pair.key, pki.path("sa.key"), pki.path("ca.key")] {
            assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600, "{}", key.display());
        }
    }
}
