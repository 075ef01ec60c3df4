package webhook

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/internal/conf"
)

const (
	specSecret = conf.Secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	specID     = "msg_p5jXN8AQM9LWM0D4loKWxJek"
	specBody   = `{"test": 2432232314}`
	specSigned = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
)

var specTime = time.Unix(1614265330, 0)

func signed(t *testing.T, id string, at time.Time, body string, secrets ...conf.Secret) http.Header {
	t.Helper()
	var keys []secret
	for _, s := range secrets {
		key, err := parseSecret(s)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, key)
	}
	h := http.Header{}
	sign(h, keys, id, at, []byte(body))
	return h
}

// The published example of Standard Webhooks.
func TestSignatureIsThatOfTheSpecification(t *testing.T) {
	h := signed(t, specID, specTime, specBody, specSecret)
	if h.Get("webhook-id") != specID || h.Get("webhook-timestamp") != "1614265330" || h.Get("webhook-signature") != specSigned {
		t.Errorf("headers %v, want signature %s", h, specSigned)
	}
	if err := Verify(h, []byte(specBody), specTime, specSecret); err != nil {
		t.Errorf("Verify = %v, want nil", err)
	}
}

func TestVerify(t *testing.T) {
	const raw = conf.Secret("not base64, and no prefix")
	ok := signed(t, specID, specTime, specBody, specSecret)
	both := signed(t, specID, specTime, specBody, raw, specSecret)
	with := func(key, value string) http.Header {
		h := ok.Clone()
		h.Set(key, value)
		return h
	}
	for _, c := range []struct {
		name   string
		h      http.Header
		body   string
		now    time.Time
		secret conf.Secret
		valid  bool
	}{
		{"as sent", ok, specBody, specTime, specSecret, true},
		{"five minutes old", ok, specBody, specTime.Add(5 * time.Minute), specSecret, true},
		{"five minutes ahead", ok, specBody, specTime.Add(-5 * time.Minute), specSecret, true},
		{"too old", ok, specBody, specTime.Add(5*time.Minute + time.Second), specSecret, false},
		{"too far ahead", ok, specBody, specTime.Add(-5*time.Minute - time.Second), specSecret, false},
		{"another body", ok, specBody + " ", specTime, specSecret, false},
		{"another id", with(HeaderID, "msg_x"), specBody, specTime, specSecret, false},
		{"another time", with(HeaderTimestamp, "1614265331"), specBody, specTime, specSecret, false},
		{"no time", with(HeaderTimestamp, ""), specBody, specTime, specSecret, false},
		{"no id", with(HeaderID, ""), specBody, specTime, specSecret, false},
		{"no signature", with(HeaderSignature, ""), specBody, specTime, specSecret, false},
		{"another version", with(HeaderSignature, strings.Replace(specSigned, "v1,", "v2,", 1)), specBody, specTime, specSecret, false},
		{"another secret", ok, specBody, specTime, raw, false},
		{"two secrets, the old one known", both, specBody, specTime, raw, true},
		{"two secrets, the new one known", both, specBody, specTime, specSecret, true},
		{"a raw secret", signed(t, specID, specTime, specBody, raw), specBody, specTime, raw, true},
		{"an empty secret", ok, specBody, specTime, "", false},
	} {
		err := Verify(c.h, []byte(c.body), c.now, c.secret)
		if (err == nil) != c.valid || (err != nil && !errors.Is(err, ErrSignature)) {
			t.Errorf("%s: Verify = %v, want valid %t", c.name, err, c.valid)
		}
	}
}

func receiver(t *testing.T, cfg Config, address string, secrets ...conf.Secret) *Receiver {
	t.Helper()
	r, err := New(cfg, conf.Secret(address), secrets...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.client.CloseIdleConnections)
	return r
}

func TestSendPostsASignedMessage(t *testing.T) {
	const second = conf.Secret("whsec_c2Vjb25k")
	var got atomic.Pointer[http.Request]
	var body atomic.Value
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		body.Store(string(b))
		got.Store(r)
		w.WriteHeader(http.StatusAccepted)
	}))
	defer s.Close()
	if err := receiver(t, Config{}, s.URL+"/hook?a=b", specSecret, second).Send(t.Context(), specID, []byte(specBody)); err != nil {
		t.Fatalf("Send = %v, want nil", err)
	}
	r := got.Load()
	if r.Method != http.MethodPost || r.URL.String() != "/hook?a=b" || r.Header.Get("Content-Type") != "application/json" || body.Load() != specBody {
		t.Errorf("received %s %s %v %q", r.Method, r.URL, r.Header, body.Load())
	}
	for _, secret := range []conf.Secret{specSecret, second} {
		if err := Verify(r.Header, []byte(specBody), time.Now(), secret); err != nil {
			t.Errorf("Verify = %v, want nil", err)
		}
	}
	if n := len(strings.Fields(r.Header.Get(HeaderSignature))); n != 2 {
		t.Errorf("%d signatures, want 2", n)
	}

	if err := receiver(t, Config{}, s.URL).Send(t.Context(), specID, []byte(specBody)); err != nil {
		t.Fatalf("Send without a secret = %v, want nil", err)
	}
	if h := got.Load().Header; h.Get(HeaderSignature) != "" || h.Get(HeaderID) != specID {
		t.Errorf("without a secret received %v", h)
	}
}

// What may be tried again is decided here, by what the receiver answered.
func TestB048WhatIsTriedAgain(t *testing.T) {
	for _, c := range []struct {
		code  int
		after string
		want  alerting.DeliveryError
		taken bool
	}{
		{code: 200, taken: true},
		{code: 204, taken: true},
		{code: 299, taken: true},
		{code: 304, want: alerting.DeliveryError{Permanent: true}},
		{code: 400, want: alerting.DeliveryError{Permanent: true}},
		{code: 401, want: alerting.DeliveryError{Permanent: true}},
		{code: 404, after: "7", want: alerting.DeliveryError{Permanent: true}},
		{code: 408, want: alerting.DeliveryError{}},
		{code: 410, want: alerting.DeliveryError{Permanent: true, Gone: true}},
		{code: 422, want: alerting.DeliveryError{Permanent: true}},
		{code: 429, want: alerting.DeliveryError{}},
		{code: 429, after: "2", want: alerting.DeliveryError{After: 2 * time.Second}},
		{code: 429, after: "-2", want: alerting.DeliveryError{}},
		{code: 429, after: "soon", want: alerting.DeliveryError{}},
		{code: 429, after: "999999999", want: alerting.DeliveryError{After: time.Hour}},
		{code: 429, after: "99999999999999999999", want: alerting.DeliveryError{}},
		{code: 429, after: "Sun, 06 Nov 1994 08:49:37 GMT", want: alerting.DeliveryError{}},
		{code: 500, want: alerting.DeliveryError{}},
		{code: 503, after: "120", want: alerting.DeliveryError{After: 2 * time.Minute}},
		{code: 599, want: alerting.DeliveryError{}},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if c.after != "" {
				w.Header().Set("Retry-After", c.after)
			}
			w.WriteHeader(c.code)
		}))
		err := receiver(t, Config{}, s.URL).Send(t.Context(), specID, []byte(specBody))
		s.Close()
		if c.taken {
			if err != nil {
				t.Errorf("%d: Send = %v, want nil", c.code, err)
			}
			continue
		}
		e, ok := errors.AsType[*alerting.DeliveryError](err)
		if !ok || e.Permanent != c.want.Permanent || e.Gone != c.want.Gone || e.After != c.want.After || !strings.Contains(err.Error(), fmt.Sprint(c.code)) {
			t.Errorf("%d, Retry-After %q: Send = %+v, want %+v and the status", c.code, c.after, e, c.want)
		}
	}
	date := time.Now().Add(time.Minute).UTC().Format(http.TimeFormat)
	if got := retryAfter(date, time.Now()); got < 58*time.Second || got > time.Minute {
		t.Errorf("retryAfter(%s) = %s, want a minute", date, got)
	}
}

func TestConnectionsThatFailAreTriedAgain(t *testing.T) {
	release := make(chan struct{})
	hang, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { // accepts and never answers
		for {
			c, err := hang.Accept()
			if err != nil {
				return
			}
			go func() { <-release; _ = c.Close() }()
		}
	}()
	defer func() { close(release); _ = hang.Close() }()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	reset := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}))
	defer reset.Close()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	for name, address := range map[string]string{
		"never answers":    "http://" + hang.Addr().String(),
		"nobody listens":   "http://" + closed.Addr().String(),
		"reset after read": reset.URL,
		"no TLS there":     strings.Replace(plain.URL, "http:", "https:", 1),
	} {
		err := receiver(t, Config{Timeout: 200 * time.Millisecond}, address).Send(t.Context(), specID, []byte(specBody))
		e, ok := errors.AsType[*alerting.DeliveryError](err)
		if !ok || e.Permanent || e.Gone || e.After != 0 {
			t.Errorf("%s: Send = %+v, want one to try again", name, err)
		}
	}
}

func TestB049RedirectsAreNotFollowed(t *testing.T) {
	var inside, outside atomic.Int32
	internal := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { inside.Add(1) }))
	defer internal.Close()
	for _, c := range []struct {
		code     int
		location func(self string) string
	}{
		{301, func(self string) string { return self + "/" }},
		{302, func(string) string { return internal.URL }},
		{303, func(string) string { return internal.URL }},
		{307, func(string) string { return internal.URL }},
		{308, func(string) string { return internal.URL }},
		{302, func(string) string { return "" }},
	} {
		outside.Store(0)
		var s *httptest.Server
		s = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			outside.Add(1)
			if r.Method != http.MethodPost {
				t.Errorf("received a %s", r.Method)
			}
			if l := c.location(s.URL); l != "" {
				w.Header().Set("Location", l)
			}
			w.WriteHeader(c.code)
		}))
		err := receiver(t, Config{}, s.URL).Send(t.Context(), specID, []byte(specBody))
		s.Close()
		e, ok := errors.AsType[*alerting.DeliveryError](err)
		if !ok || !e.Permanent || !strings.Contains(err.Error(), fmt.Sprint(c.code)) {
			t.Errorf("%d: Send = %v, want it refused with the status", c.code, err)
		}
		if n := outside.Load(); n != 1 {
			t.Errorf("%d: %d requests, want 1", c.code, n)
		}
	}
	if n := inside.Load(); n != 0 {
		t.Errorf("%d requests to where a redirect leads, want 0", n)
	}
}

// An answer without an end costs 64 KiB, and what it said before counts.
func TestB084AnswersAreReadNoFurtherThanNeeded(t *testing.T) {
	var wrote atomic.Int64
	ended := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		chunk := make([]byte, 32<<10)
		for wrote.Load() < 100<<20 {
			n, err := w.Write(chunk)
			wrote.Add(int64(n))
			if err != nil {
				return
			}
		}
	}))
	defer s.Close()
	if err := receiver(t, Config{}, s.URL).Send(t.Context(), specID, []byte(specBody)); err != nil {
		t.Errorf("Send = %v, want nil", err)
	}
	<-ended
	if n := wrote.Load(); n > 20<<20 { // the rest is in socket buffers
		t.Errorf("the server could write %d bytes, want not nearly all 100 MiB", n)
	}
}

func TestAddressesThatAreNone(t *testing.T) {
	for _, address := range []string{"", "hook.example", "ftp://hook.example/s3cr3t", "http:///s3cr3t", "https://s3cr3t@", "http://a b/s3cr3t", "http://h:s3cr3t/", "://s3cr3t"} {
		_, err := New(Config{}, conf.Secret(address))
		if err == nil || strings.Contains(err.Error(), "s3cr3t") {
			t.Errorf("New(%q) = %v, want an error that does not quote it", address, err)
		}
	}
	for _, secret := range []conf.Secret{"", "whsec_", "whsec_s3cr3t!"} {
		_, err := New(Config{}, "http://hook.example", secret)
		if err == nil || strings.Contains(err.Error(), "s3cr3t") {
			t.Errorf("New with secret %q = %v, want an error that does not quote it", secret.Reveal(), err)
		}
	}
}

// Addresses of webhooks often are secrets themselves.
func TestSecretsAreNeverPrinted(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(500) }))
	defer s.Close()
	host := strings.TrimPrefix(s.URL, "http://")
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	for _, h := range []string{host, closed.Addr().String(), "no-such-host.invalid"} {
		r := receiver(t, Config{Timeout: time.Second}, "http://user:s3cr3t@"+h+"/services/s3cr3t?token=s3cr3t", "s3cr3t", "whsec_czNjcjN0")
		err := r.Send(t.Context(), specID, []byte(specBody))
		if err == nil {
			t.Fatal("Send = nil, want an error")
		}
		text := fmt.Sprintf("%v %+v %s %v %#v", err, err, r, r.secrets, r.secrets)
		if strings.Contains(text, "s3cr3t") || strings.Contains(text, "czNjcjN0") || strings.Contains(text, "0x73") {
			t.Errorf("printed: %s", text)
		}
		if !strings.Contains(err.Error(), h) {
			t.Errorf("Send = %v, want the host named", err)
		}
	}
}
