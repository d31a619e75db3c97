//! What real nodes are given: images and volumes.

use crate::Error;
use crate::cluster::Cluster;
use crate::image::Image;
use crate::node::{Node, PAUSE_IMAGE};
use crate::process::run;
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use std::path::Path;
use std::process::Command;

const PAUSE: &str = include_str!("pause.c");

// === impl Cluster ===

impl Cluster {
    /// Builds an image and imports it on every real node. Pods then name it with `imagePullPolicy: Never`.
    pub async fn load_image(&self, image: &Image) -> Result<(), Error> {
        let (image, dir) = (image.clone(), self.scratch.path("images"));
        let ctr = self.toolbox.path("ctr")?;
        let sockets: Vec<_> = (0..self.layers.node_count()).map(|node| self.node(node).socket()).collect();
        let work = move || {
            let tar = image.write(&dir)?;
            for socket in sockets {
                let mut command = Command::new(&ctr);
                command.arg("--address").arg(socket).args(["--namespace", "k8s.io", "images", "import"]).arg(&tar);
                run(&mut command)?;
            }
            std::fs::remove_file(&tar).map_err(Error::io("remove", &tar))
        };
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|error| Error::Settings(format!("building an image was cut off: {error}")))?
    }

    /// A volume on one real node whose bytes lie in `folder` of this machine; a claim with `storageClassName: class` binds to it.
    pub async fn local_volume(&self, name: &str, node: usize, class: &str, size: &str, folder: &Path) -> Result<(), Error> {
        self.volume(name, &[Node::name(node)], class, size, folder).await
    }

    /// The same on every real node: they share this machine's disk.
    pub async fn shared_volume(&self, name: &str, class: &str, size: &str, folder: &Path) -> Result<(), Error> {
        let nodes: Vec<String> = (0..self.layers.node_count()).map(Node::name).collect();
        self.volume(name, &nodes, class, size, folder).await
    }

    async fn volume(&self, name: &str, nodes: &[String], class: &str, size: &str, folder: &Path) -> Result<(), Error> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let volume: PersistentVolume = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": size},
                "accessModes": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": class,
                "local": {"path": folder},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                    {"key": "kubernetes.io/hostname", "operator": "In", "values": nodes},
                ]}]}},
            },
        }))
        .map_err(|error| Error::Settings(format!("volume `{name}`: {error}")))?;
        let volumes = Api::<PersistentVolume>::all(self.client().await?);
        volumes.create(&PostParams::default(), &volume).await.map(drop).map_err(Error::api(format!("create volume `{name}`")))
    }
}

/// Compiles the program that holds a pod's namespaces.
pub(crate) fn pause_image(scratch: &Path) -> Result<Image, Error> {
    let (source, program) = (scratch.join("pause.c"), scratch.join("pause"));
    std::fs::write(&source, PAUSE).map_err(Error::io("write", &source))?;
    run(Command::new("cc").args(["-O2", "-static", "-o"]).arg(&program).arg(&source))?;
    Image::scratch(PAUSE_IMAGE).program("/pause", &program)
}
