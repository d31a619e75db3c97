//! Why a container's last life ended, in its own words.
//!
//! Owns the reading of what the kubelet keeps of a log's end: the last line, which is JSON where our programs wrote it, and anything else where they
//! could not. Pure.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus};
use serde_json::Value;

/// Longest text that is taken over, in bytes.
const WHY_BYTES_MAX: usize = 400;
/// What a failure is about that keeps a worker from reading its model.
const MODEL: &str = "model";

/// A bad end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ended {
    /// Whether the model could not be had or read.
    pub about_model: bool,
    /// Why, for people.
    pub why: String,
}

// === impl Ended ===

impl Ended {
    /// Of the life that is over, or the one before the life that runs; `None` if it ended well or there was none.
    pub fn of(container: &ContainerStatus) -> Option<Self> {
        let terminated = [&container.state, &container.last_state].into_iter().flatten().find_map(|it| it.terminated.as_ref())?;
        (terminated.exit_code != 0).then(|| Self::read(terminated))
    }

    fn read(terminated: &ContainerStateTerminated) -> Self {
        let last = terminated.message.as_deref().unwrap_or_default().lines().map(str::trim).rfind(|line| !line.is_empty());
        let line: Value = last.and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
        let fields = &line["fields"];
        let told = fields["error"].as_str().or(last).map(str::to_owned);
        let code = || format!("{} (exit code {})", terminated.reason.as_deref().unwrap_or("Error"), terminated.exit_code);
        let mut why = told.unwrap_or_else(code);
        why.truncate(why.floor_char_boundary(WHY_BYTES_MAX));
        Self { about_model: fields["about"] == MODEL, why }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
    use super::*;
    use serde_json::json;

    fn ended(code: i32, message: &str) -> Option<Ended> {
        let terminated = json!({"terminated": {"exitCode": code, "reason": "Error", "message": message}});
        let status = json!({"name": "worker", "image": "", "imageID": "", "ready": false, "restartCount": 1,
            "state": {"running": {}}, "lastState": terminated});
        Ended::of(&serde_json::from_value(status).unwrap())
    }

    #[test]
    fn the_last_line_of_a_log_says_why() {
        let line = |about: Value| json!({"level": "ERROR", "fields": {"message": "the worker cannot go on", "error": "no file", "about": about}});
        let found = ended(1, &format!("{{\"cut\n{}\n", line(json!("model")))).unwrap();
        assert_eq!((found.about_model, &*found.why), (true, "no file"));
        assert!(!ended(1, &line(Value::Null).to_string()).unwrap().about_model);
        assert_eq!(ended(101, "thread panicked\n").unwrap().why, "thread panicked");
        assert_eq!(ended(137, "").unwrap().why, "Error (exit code 137)");
        assert_eq!(ended(0, "bye"), None);
        assert!(ended(1, &"\u{e9}".repeat(1_000)).unwrap().why.len() <= WHY_BYTES_MAX);
    }
}
