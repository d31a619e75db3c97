//! Names of Services for pods: a small name server on the bridge.
//!
//! Answers address questions for `SERVICE.NAMESPACE.svc.cluster.local`, asked of the API server each time, so that no answer is older than its
//! question; a headless Service has the addresses of its ready endpoints. Refuses everything else: nothing outside the cluster has a name here.
//! Called when a cluster has real nodes. Costs one or two reads per question.

use crate::Error;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ListParams;
use kube::{Api, Client};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

/// Domain of the cluster, as the kubelet is told.
pub(crate) const DOMAIN: &str = "cluster.local";
const PORT: u16 = 53;
/// Largest message over UDP without extensions.
const MESSAGE_BYTES_MAX: usize = 512;
/// Addresses that fit into such a message beside the longest name.
const ADDRESSES_MAX: usize = 12;
const HEADER_BYTES: usize = 12;
const TYPE_A: u16 = 1;
const CLASS_IN: u16 = 1;
const NO_SUCH_NAME: u8 = 3;
const SERVER_FAILURE: u8 = 2;
/// Services come and go within one test.
const SECONDS_KEPT: u32 = 1;

/// The server, running as long as this.
pub(crate) struct Names {
    _task: JoinSet<()>,
}

/// What somebody wants to know.
#[derive(Debug, PartialEq, Eq)]
struct Question {
    /// Lower case, without the last dot.
    name: String,
    kind: u16,
    /// Where the message's question section ends.
    end: usize,
}

// === impl Names ===

impl Names {
    /// Listens on the bridge, on the current runtime.
    pub(crate) async fn serve(client: Client, host: Ipv4Addr) -> Result<Self, Error> {
        let address = SocketAddr::from((host, PORT));
        let socket = UdpSocket::bind(address).await.map_err(Error::io("bind", Path::new(&address.to_string())))?;
        let mut task = JoinSet::new();
        task.spawn(answer_all(socket, client));
        Ok(Self { _task: task })
    }
}

async fn answer_all(socket: UdpSocket, client: Client) {
    let mut message = [0; MESSAGE_BYTES_MAX];
    loop {
        let (len, asker) = match socket.recv_from(&mut message).await {
            Ok(received) => received,
            Err(error) => {
                // On UDP these are news of earlier answers that nobody waited for.
                tracing::debug!(%error, "a name question was lost");
                continue;
            }
        };
        let Some(question) = Question::parse(&message[..len]) else { continue };
        let answer = match question.service() {
            None => reply(&message[..question.end], NO_SUCH_NAME, &[]),
            Some((service, namespace)) => match addresses(&client, namespace, service).await {
                Ok(Some(found)) if question.kind == TYPE_A => reply(&message[..question.end], 0, &found),
                // It exists, but has no address of the kind that is asked for.
                Ok(Some(_)) => reply(&message[..question.end], 0, &[]),
                Ok(None) => reply(&message[..question.end], NO_SUCH_NAME, &[]),
                Err(error) => {
                    tracing::debug!(%error, name = question.name, "the API server did not tell a name");
                    reply(&message[..question.end], SERVER_FAILURE, &[])
                }
            },
        };
        if let Err(error) = socket.send_to(&answer, asker).await {
            tracing::debug!(%error, %asker, "an answer was not sent; who asked asks again");
        }
    }
}

/// Addresses of a Service; `None` if there is none of this name.
async fn addresses(client: &Client, namespace: &str, name: &str) -> Result<Option<Vec<Ipv4Addr>>, kube::Error> {
    let Some(service) = Api::<Service>::namespaced(client.clone(), namespace).get_opt(name).await? else { return Ok(None) };
    let own = service.spec.and_then(|spec| spec.cluster_ip).and_then(|address| address.parse().ok());
    if let Some(own) = own {
        return Ok(Some(vec![own]));
    }
    let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={name}"));
    let slices = Api::<EndpointSlice>::namespaced(client.clone(), namespace).list(&of_service).await?;
    let ready = slices
        .items
        .into_iter()
        .flat_map(|slice| slice.endpoints)
        .filter(|endpoint| endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) != Some(false))
        .flat_map(|endpoint| endpoint.addresses);
    Ok(Some(ready.filter_map(|address| address.parse().ok()).take(ADDRESSES_MAX).collect()))
}

// === impl Question ===

impl Question {
    /// `None` for what is no single question.
    fn parse(message: &[u8]) -> Option<Self> {
        let is_answer = message.get(2)? & 0x80 != 0;
        let count = u16::from_be_bytes([*message.get(4)?, *message.get(5)?]);
        if is_answer || count != 1 {
            return None;
        }
        let (mut labels, mut at) = (Vec::new(), HEADER_BYTES);
        loop {
            let len = usize::from(*message.get(at)?);
            at += 1;
            if len == 0 {
                break;
            }
            // Longer ones would be pointers, which a question has no use for.
            if len > 63 {
                return None;
            }
            labels.push(std::str::from_utf8(message.get(at..at + len)?).ok()?.to_ascii_lowercase());
            at += len;
        }
        let kind = u16::from_be_bytes([*message.get(at)?, *message.get(at + 1)?]);
        message.get(at + 3)?;
        Some(Self { name: labels.join("."), kind, end: at + 4 })
    }

    /// Service and namespace, if the name is one of a Service.
    fn service(&self) -> Option<(&str, &str)> {
        let inside = self.name.strip_suffix(DOMAIN)?.strip_suffix(".svc.")?;
        inside.split_once('.').filter(|(_, namespace)| !namespace.contains('.'))
    }
}

/// `asked` is the message up to the end of its question, which an answer repeats.
fn reply(asked: &[u8], code: u8, addresses: &[Ipv4Addr]) -> Vec<u8> {
    let mut message = asked.to_vec();
    let wants_recursion = message[2] & 0x01;
    // An answer, by whoever is responsible for the name.
    message[2] = 0x84 | wants_recursion;
    message[3] = code;
    let counts = [1, addresses.len() as u16, 0, 0];
    for (at, count) in counts.into_iter().enumerate() {
        message[4 + 2 * at..6 + 2 * at].copy_from_slice(&count.to_be_bytes());
    }
    for address in addresses {
        // The name is the question's, which begins after the header.
        message.extend([0xC0, HEADER_BYTES as u8]);
        message.extend(TYPE_A.to_be_bytes());
        message.extend(CLASS_IN.to_be_bytes());
        message.extend(SECONDS_KEPT.to_be_bytes());
        message.extend(4_u16.to_be_bytes());
        message.extend(address.octets());
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(name: &str, kind: u16) -> Vec<u8> {
        let mut message = vec![0xAB, 0xCD, 0x01, 0, 0, 1, 0, 0, 0, 0, 0, 1];
        for label in name.split('.') {
            message.push(label.len() as u8);
            message.extend(label.as_bytes());
        }
        message.push(0);
        message.extend(kind.to_be_bytes());
        message.extend(CLASS_IN.to_be_bytes());
        message
    }

    #[test]
    fn a_question_names_a_service_and_its_namespace() {
        let question = Question::parse(&asked("First-Router.team-a.svc.cluster.local", TYPE_A)).unwrap();
        assert_eq!(question.service(), Some(("first-router", "team-a")));
        for other in ["example.com", "svc.cluster.local", "a.b.c.svc.cluster.local", "first.team-a.svc.cluster.local.team-a"] {
            assert_eq!(Question::parse(&asked(other, TYPE_A)).unwrap().service(), None, "{other}");
        }
    }

    #[test]
    fn what_is_cut_off_is_no_question() {
        let whole = asked("a.b.svc.cluster.local", TYPE_A);
        for len in 0..whole.len() {
            assert_eq!(Question::parse(&whole[..len]), None, "{len}");
        }
        assert!(Question::parse(&whole).is_some());
    }

    #[test]
    fn an_answer_repeats_the_question_and_holds_every_address() {
        let mut message = asked("a.b.svc.cluster.local", TYPE_A);
        let end = message.len();
        // An extension after the question is not repeated.
        message.extend([0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let question = Question::parse(&message).unwrap();
        assert_eq!(question.end, end);
        let answer = reply(&message[..question.end], 0, &[Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)]);
        assert_eq!(answer[..12], [0xAB, 0xCD, 0x85, 0, 0, 1, 0, 2, 0, 0, 0, 0]);
        assert_eq!(answer[12..end], message[12..end]);
        assert_eq!(answer.len(), end + 2 * 16);
        assert!(answer.ends_with(&[0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 10, 0, 0, 2]));
    }

    #[test]
    fn the_longest_name_and_all_addresses_fit_into_one_message() {
        let label = "a".repeat(63);
        let name = [label.as_str(), label.as_str(), "svc", DOMAIN].join(".");
        let answer = reply(&asked(&name, TYPE_A), 0, &[Ipv4Addr::LOCALHOST; ADDRESSES_MAX]);
        assert!(answer.len() <= MESSAGE_BYTES_MAX, "{}", answer.len());
    }
}
