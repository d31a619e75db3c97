//! Waiting for something to be true: asks a real endpoint again and again, with a bound, and keeps the last answer.

use crate::Error;
use std::future::Future;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Between two questions.
const PAUSE: Duration = Duration::from_millis(50);
/// An answer that takes longer counts as none.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Asks until the answer is `Ok`, at most `limit`; the last `Err` is part of the error.
pub async fn until<T, F>(what: &str, limit: Duration, mut ask: impl FnMut() -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, String>>,
{
    let began = Instant::now();
    loop {
        let last = match tokio::time::timeout(ANSWER_MAX, ask()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(last)) => last,
            Err(_) => format!("no answer within {} s", ANSWER_MAX.as_secs()),
        };
        if began.elapsed() > limit {
            return Err(Error::Late { what: what.to_owned(), limit, last });
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Whether `GET path` answers 200 over plain HTTP.
pub async fn http_ok(address: SocketAddr, path: &str) -> Result<(), String> {
    let answer = http_get(address, path).await.map_err(|error| format!("{address}{path}: {error}"))?;
    let status = answer.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) == Some("200") { Ok(()) } else { Err(format!("{address}{path}: {}", answer.trim())) }
}

/// The whole answer, head and body, of a plain HTTP/1.0 `GET`.
pub async fn http_get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut socket = TcpStream::connect(address).await?;
    socket.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes()).await?;
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_answer_is_told_when_the_bound_is_passed() {
        let mut asked = 0;
        let never = until("the sea is dry", Duration::ZERO, || {
            asked += 1;
            let answer = format!("asked {asked} times");
            async { Err::<(), _>(answer) }
        });
        assert_eq!(
            never.await.unwrap_err().to_string(),
            "the sea is dry did not come true within 0 s; last answer: asked 1 times"
        );
    }
}
