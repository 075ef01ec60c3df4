package webhook

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/weirhq/weir/internal/conf"
)

// Headers of a signed message.
const (
	HeaderID        = "webhook-id"        // names the message; the same in every attempt
	HeaderTimestamp = "webhook-timestamp" // of the attempt, in seconds since 1970
	HeaderSignature = "webhook-signature" // one or more, separated by spaces
)

// tolerance is how old or how far ahead a message may be when it is verified, so that an old one cannot be played again.
const tolerance = 5 * time.Minute

// Prefixes of the symmetric scheme.
const (
	secretPrefix = "whsec_"
	version      = "v1,"
)

// secret is a key for HMAC-SHA256.
type secret []byte

func (secret) String() string   { return "***" }
func (secret) GoString() string { return "***" }

// parseSecret reads whsec_ and base64, or takes any other text as it is.
func parseSecret(s conf.Secret) (secret, error) {
	text := s.Reveal()
	if text == "" {
		return nil, errors.New("is empty")
	}
	encoded, ok := strings.CutPrefix(text, secretPrefix)
	if !ok {
		return secret(text), nil
	}
	key, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		key, err = base64.RawStdEncoding.DecodeString(encoded)
	}
	if err != nil || len(key) == 0 { // err says where, which is no business of a log
		return nil, fmt.Errorf("starts with %s, but what follows is not base64", secretPrefix)
	}
	return key, nil
}

// signature is that of a message by one key.
func (s secret) signature(id, timestamp string, body []byte) string {
	mac := hmac.New(sha256.New, s)
	mac.Write([]byte(id + "." + timestamp + "."))
	mac.Write(body)
	return version + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// sign sets the headers of a message that is sent at at.
func sign(h http.Header, keys []secret, id string, at time.Time, body []byte) {
	timestamp := strconv.FormatInt(at.Unix(), 10)
	h.Set(HeaderID, id)
	h.Set(HeaderTimestamp, timestamp)
	var all []string
	for _, key := range keys {
		all = append(all, key.signature(id, timestamp, body))
	}
	if len(all) > 0 {
		h.Set(HeaderSignature, strings.Join(all, " "))
	}
}

// ErrSignature is returned by Verify for a message that is not from who has the secret, or is not new.
var ErrSignature = errors.New("webhook signature")

// Verify checks a message that was received at now. One signature by one of the secrets is enough. It is for those who
// write receivers, and for tests.
func Verify(h http.Header, body []byte, now time.Time, secrets ...conf.Secret) error {
	id, timestamp := h.Get(HeaderID), h.Get(HeaderTimestamp)
	seconds, err := strconv.ParseInt(timestamp, 10, 64)
	if id == "" || err != nil {
		return fmt.Errorf("%w: %s or %s is missing or malformed", ErrSignature, HeaderID, HeaderTimestamp)
	}
	if age := now.Sub(time.Unix(seconds, 0)); age.Abs() > tolerance {
		return fmt.Errorf("%w: sent %s ago, want at most %s", ErrSignature, age.Round(time.Second), tolerance)
	}
	for _, s := range secrets {
		key, err := parseSecret(s)
		if err != nil {
			return fmt.Errorf("%w: secret: %w", ErrSignature, err)
		}
		want := key.signature(id, timestamp, body)
		for _, got := range strings.Fields(h.Get(HeaderSignature)) {
			if hmac.Equal([]byte(got), []byte(want)) {
				return nil
			}
		}
	}
	return fmt.Errorf("%w: none is by a secret of ours", ErrSignature)
}
