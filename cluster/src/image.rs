//! Container images without a registry: a program, the libraries it loads, and a few files, as one layer in a tar.
//!
//! Flow: [`Image::scratch`] → [`Image::program`] and [`Image::file`] → `Cluster::load_image`. The user is not root, the layer has no shell.
//! Equal input gives equal bytes, so an image's id changes only with what is in it. Costs a copy and two SHA-256 of the files.

use crate::Error;
use crate::process::run;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The user that images run as unless told otherwise: what `nonroot` is in common base images.
const NONROOT: u32 = 65532;

/// An image to be built.
#[derive(Clone, Debug)]
pub struct Image {
    reference: String,
    user: u32,
    entrypoint: Vec<String>,
    env: Vec<String>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug)]
enum Entry {
    Host(PathBuf),
    Text(String),
    Dir { mode: u32, user: u32 },
}

// === impl Image ===

impl Image {
    /// An image that holds only `/etc/passwd`, `/etc/group` and `/tmp`. Give it a name with a tag, such as `kvasir.test/router:1`.
    pub fn scratch(reference: &str) -> Self {
        let image = Self {
            reference: reference.to_owned(),
            user: NONROOT,
            entrypoint: Vec::new(),
            env: vec!["PATH=/usr/local/bin:/usr/bin:/bin:/".to_owned()],
            entries: BTreeMap::new(),
        };
        let passwd = format!("root:x:0:0:root:/root:/none\nnonroot:x:{NONROOT}:{NONROOT}:nonroot:/tmp:/none\n");
        image
            .text("/etc/passwd", &passwd)
            .text("/etc/group", &format!("root:x:0:\nnonroot:x:{NONROOT}:\n"))
            .text("/etc/nsswitch.conf", "hosts: files dns\n")
            .entry("/tmp", Entry::Dir { mode: 0o1777, user: 0 })
    }

    /// Its name and tag.
    pub fn reference(&self) -> &str {
        &self.reference
    }

    /// Adds a program with every library that it loads, and makes it the entry point.
    pub fn program(mut self, at: &str, host: &Path) -> Result<Self, Error> {
        for library in libraries(host)? {
            let path = library.display().to_string();
            self.entries.insert(path, Entry::Host(library));
        }
        self.entrypoint = vec![at.to_owned()];
        Ok(self.file(at, host))
    }

    /// Adds a file of this machine, with its mode.
    pub fn file(self, at: &str, host: &Path) -> Self {
        self.entry(at, Entry::Host(host.to_owned()))
    }

    /// Adds a file that anybody can read.
    pub fn text(self, at: &str, text: &str) -> Self {
        self.entry(at, Entry::Text(text.to_owned()))
    }

    /// Adds an empty folder that the image's user owns.
    pub fn folder(self, at: &str) -> Self {
        let user = self.user;
        self.entry(at, Entry::Dir { mode: 0o755, user })
    }

    /// Another user than 65532.
    pub const fn user(mut self, user: u32) -> Self {
        self.user = user;
        self
    }

    /// An environment variable.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push(format!("{name}={value}"));
        self
    }

    fn entry(mut self, at: &str, entry: Entry) -> Self {
        self.entries.insert(at.to_owned(), entry);
        self
    }

    /// Writes the image's tar into `dir` and gives its path.
    pub fn write(&self, dir: &Path) -> Result<PathBuf, Error> {
        fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        let layer_path = dir.join("layer.tar");
        let layer = self.write_layer(&layer_path).map_err(Error::io("write", &layer_path))?;
        let config = self.config(&layer).to_string();
        let config_name = format!("{}.json", hex::encode(Sha256::digest(&config)));
        let layer_name = format!("{layer}/layer.tar");
        let manifest = json!([{"Config": config_name, "RepoTags": [self.reference], "Layers": [layer_name]}]).to_string();
        let path = dir.join("image.tar");
        let write = || -> io::Result<()> {
            let mut tar = tar::Builder::new(BufWriter::new(File::create(&path)?));
            append(&mut tar, &config_name, 0o644, 0, config.as_bytes(), config.len() as u64)?;
            let file = File::open(&layer_path)?;
            let len = file.metadata()?.len();
            append(&mut tar, &layer_name, 0o644, 0, file, len)?;
            append(&mut tar, "manifest.json", 0o644, 0, manifest.as_bytes(), manifest.len() as u64)?;
            tar.into_inner()?.flush()
        };
        write().map_err(Error::io("write", &path))?;
        fs::remove_file(&layer_path).map_err(Error::io("remove", &layer_path))?;
        Ok(path)
    }

    /// Writes the only layer and gives its digest.
    fn write_layer(&self, path: &Path) -> io::Result<String> {
        let out = Hashing { inner: BufWriter::new(File::create(path)?), digest: Sha256::new() };
        let mut tar = tar::Builder::new(out);
        for dir in self.parents() {
            append_dir(&mut tar, &dir, 0o755, 0)?;
        }
        for (at, entry) in &self.entries {
            let name = at.trim_start_matches('/');
            match entry {
                Entry::Dir { mode, user } => append_dir(&mut tar, name, *mode, *user)?,
                Entry::Text(text) => append(&mut tar, name, 0o644, 0, text.as_bytes(), text.len() as u64)?,
                Entry::Host(host) => {
                    // Libraries are often links to a versioned file; the image holds the file under the name that is asked for.
                    let file = File::open(host)?;
                    let meta = file.metadata()?;
                    let mode = 0o644 | (std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o111);
                    append(&mut tar, name, mode, 0, file, meta.len())?;
                }
            }
        }
        let mut out = tar.into_inner()?;
        out.flush()?;
        Ok(hex::encode(out.digest.finalize()))
    }

    /// Every folder above an entry that is not an entry itself, outermost first.
    fn parents(&self) -> BTreeSet<String> {
        let named = |dir: &str| self.entries.contains_key(&format!("/{dir}"));
        self.entries
            .keys()
            .flat_map(|at| Path::new(at.trim_start_matches('/')).ancestors().skip(1))
            .map(|dir| dir.display().to_string())
            .filter(|dir| !dir.is_empty() && !named(dir))
            .collect()
    }

    fn config(&self, layer: &str) -> serde_json::Value {
        json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "config": {
                "User": format!("{0}:{0}", self.user),
                "Env": self.env,
                "Entrypoint": self.entrypoint,
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer}")]},
        })
    }
}

struct Hashing<W> {
    inner: W,
    digest: Sha256,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.digest.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn append<W: Write>(
    tar: &mut tar::Builder<W>,
    name: &str,
    mode: u32,
    user: u32,
    data: impl io::Read,
    len: u64,
) -> io::Result<()> {
    let mut header = header(tar::EntryType::Regular, mode, user);
    header.set_size(len);
    tar.append_data(&mut header, name, data)
}

fn append_dir<W: Write>(tar: &mut tar::Builder<W>, name: &str, mode: u32, user: u32) -> io::Result<()> {
    let mut header = header(tar::EntryType::Directory, mode, user);
    header.set_size(0);
    tar.append_data(&mut header, format!("{}/", name.trim_end_matches('/')), io::empty())
}

fn header(kind: tar::EntryType, mode: u32, user: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(user.into());
    header.set_gid(user.into());
    header.set_mtime(0);
    header
}

/// What the dynamic linker would load, the linker included; nothing for a static program.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, Error> {
    if !program.exists() {
        let hint = "build it first".to_owned();
        return Err(Error::Missing { program: program.display().to_string(), hint });
    }
    match run(Command::new("ldd").arg(program)) {
        Ok(text) => parse_ldd(&text),
        // `ldd` fails on a static program and says so.
        Err(Error::Command { output, .. }) if output.contains("not a dynamic executable") => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn parse_ldd(text: &str) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.contains("not found") {
            return Err(Error::Settings(format!("the program needs a library that is not there: {line}")));
        }
        let path = line.split("=>").last().unwrap_or_default().split_whitespace().next().unwrap_or_default();
        if path.starts_with('/') {
            found.push(PathBuf::from(path));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    const LDD: &str = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";

    #[test]
    fn libraries_and_the_linker_are_found_and_the_kernels_own_is_not() {
        let found = parse_ldd(LDD).unwrap();
        assert_eq!(found, [Path::new("/lib/x86_64-linux-gnu/libc.so.6"), Path::new("/lib64/ld-linux-x86-64.so.2")]);
        assert_eq!(parse_ldd("\tstatically linked\n").unwrap(), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_library_that_is_not_there_is_an_error_that_names_it() {
        let error = parse_ldd("\tlibcuda.so.1 => not found\n").unwrap_err().to_string();
        assert!(error.contains("libcuda.so.1"), "{error}");
    }

    #[test]
    fn an_image_holds_its_program_and_says_who_runs_it() {
        let dir = tempfile::tempdir().unwrap();
        let image = Image::scratch("kvasir.test/true:1").program("/app/true", Path::new("/bin/true")).unwrap().folder("/data");
        let first = fs::read(image.write(dir.path()).unwrap()).unwrap();
        let again = fs::read(image.write(dir.path()).unwrap()).unwrap();
        assert!(first == again, "equal input gives equal bytes");

        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(&first[..]).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            files.insert(name, bytes);
        }
        let manifest: serde_json::Value = serde_json::from_slice(&files["manifest.json"]).unwrap();
        assert_eq!(manifest[0]["RepoTags"][0], "kvasir.test/true:1");
        let config: serde_json::Value = serde_json::from_slice(&files[manifest[0]["Config"].as_str().unwrap()]).unwrap();
        assert_eq!(config["config"]["User"], "65532:65532");
        assert_eq!(config["config"]["Entrypoint"][0], "/app/true");
        let layer = &files[manifest[0]["Layers"][0].as_str().unwrap()];
        assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{}", hex::encode(Sha256::digest(layer))));

        let modes: BTreeMap<String, u32> = tar::Archive::new(&layer[..])
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.path().unwrap().display().to_string(), entry.header().mode().unwrap()))
            .collect();
        assert_eq!(modes["tmp/"], 0o1777);
        assert_eq!(modes["app/true"] & 0o777, 0o755);
        assert!(modes.keys().any(|name| name.contains("libc.so.6")), "{modes:?}");
        assert!(modes.contains_key("data/") && modes.contains_key("etc/passwd") && modes.contains_key("app/"));
    }
}
