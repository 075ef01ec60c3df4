// Package webhook hands alerts to on-call over HTTP, signed as Standard Webhooks says.
package webhook

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/internal/conf"
)

// Config is tuning. A zero field means its default.
type Config struct {
	Timeout time.Duration // of one attempt, the answer included (10s)
}

// maxResponse is how much of an answer is read; what a receiver says is not used.
const maxResponse = 64 << 10

// maxAfter bounds what a Retry-After header can ask for.
const maxAfter = time.Hour

// Receiver is one webhook. It is an alerting.Receiver, and safe for concurrent use.
type Receiver struct {
	cfg     Config
	url     *url.URL
	secrets []secret
	client  *http.Client
}

// New returns the receiver at address, which is the operator's own and may be any http or https URL. Every secret signs, so
// that one can be replaced without an interruption; without any, messages go out unsigned. New does not connect.
func New(cfg Config, address conf.Secret, secrets ...conf.Secret) (*Receiver, error) {
	if cfg.Timeout == 0 {
		cfg.Timeout = 10 * time.Second
	}
	u, err := url.Parse(address.Reveal())
	switch { // an address often holds a secret, and err would quote it
	case err != nil:
		return nil, errors.New("webhook: the address is not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("webhook: the address has scheme %q, want https or http", u.Scheme)
	case u.Hostname() == "":
		return nil, errors.New("webhook: the address has no host")
	}
	r := &Receiver{cfg: cfg, url: u}
	for i, s := range secrets {
		key, err := parseSecret(s)
		if err != nil {
			return nil, fmt.Errorf("webhook: secret %d: %w", i+1, err)
		}
		r.secrets = append(r.secrets, key)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = 2
	transport.MaxResponseHeaderBytes = maxResponse
	transport.ResponseHeaderTimeout = cfg.Timeout
	r.client = &http.Client{Transport: transport,
		// A redirect could lead anywhere, and would turn the POST into a GET.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return r, nil
}

// String names the receiver without what may be secret in its address.
func (r *Receiver) String() string { return r.url.Scheme + "://" + r.url.Host }

// Send posts body under id, once. It returns nil for any 2xx answer; errors are *alerting.DeliveryError: 5xx, 429, 408,
// timeouts and connections that fail are worth another attempt, any other answer is not, redirects included. Their text
// holds no part of the address but its host.
func (r *Receiver) Send(ctx context.Context, id string, body []byte) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url.String(), bytes.NewReader(body))
	if err != nil {
		return &alerting.DeliveryError{Permanent: true, Err: fmt.Errorf("post to %s: %w", r, redact(err))}
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "weir")
	sign(req.Header, r.secrets, id, time.Now(), body)
	resp, err := r.client.Do(req)
	if err != nil {
		return &alerting.DeliveryError{Err: fmt.Errorf("post to %s: %w", r, redact(err))}
	}
	defer func() {
		// The connection is used again only if little is left to read. An error here changes nothing about the answer.
		_, _ = io.CopyN(io.Discard, resp.Body, maxResponse)
		_ = resp.Body.Close()
	}()
	code := resp.StatusCode
	if code/100 == 2 {
		return nil
	}
	again := code/100 == 5 || code == http.StatusTooManyRequests || code == http.StatusRequestTimeout
	e := &alerting.DeliveryError{Permanent: !again, Gone: code == http.StatusGone, Err: fmt.Errorf("post to %s: answered %d %s", r, code, http.StatusText(code))}
	if again {
		e.After = retryAfter(resp.Header.Get("Retry-After"), time.Now())
	}
	return e
}

// redact takes the address out of an error of net/http.
func redact(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		if e.Timeout() {
			return errors.New("no answer in time")
		}
		err = e.Err
	}
	if e, ok := errors.AsType[*net.OpError](err); ok {
		return fmt.Errorf("%s: %w", e.Op, e.Err)
	}
	return err
}

// retryAfter reads the header of that name, in seconds or as a date. It is 0 when that says nothing, and an hour at most.
func retryAfter(s string, now time.Time) time.Duration {
	if n, err := strconv.ParseUint(s, 10, 32); err == nil {
		return min(time.Duration(n)*time.Second, maxAfter)
	}
	if t, err := http.ParseTime(s); err == nil {
		return min(max(t.Sub(now), 0), maxAfter)
	}
	return 0
}
