package limits

import (
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
)

// parsedRate is what a rate says.
type parsedRate struct {
	rate      bucket.Rate
	perSecond int64 // tokens in one second, rounded up
	deny      bool
	unlimited bool
}

const rateForm = "want N/s, N/m, N/h, N/d or N/15s, where N is 10, 0.5 or 10/13; 0; or unlimited"

var (
	rateNumber = regexp.MustCompile(`^(\d{1,40})(\.\d{1,40})?$`)
	ratePart   = regexp.MustCompile(`^(\d{1,40})/(\d{1,40})$`)
	rateDays   = regexp.MustCompile(`^(\d{1,5})d$`)
)

// parseRate reads a rate: N/PERIOD, 0 or unlimited. The last slash divides N from the period. N is a whole number, a decimal
// or a fraction of whole numbers (10/13/s is ten thirteenths of a token per second). The period is a unit s, m, h or d, or a
// number of them as [time.ParseDuration] and, for days, common sense read it (15s, 1h30m, 7d).
func parseRate(s string) (parsedRate, error) {
	switch s {
	case "unlimited":
		return parsedRate{unlimited: true}, nil
	case "0":
		return parsedRate{deny: true}, nil
	}
	i := strings.LastIndexByte(s, '/')
	if i < 0 {
		return parsedRate{}, fmt.Errorf("%q is not a rate: %s", s, rateForm)
	}
	number, period := s[:i], s[i+1:]
	n := new(big.Rat)
	if m := ratePart.FindStringSubmatch(number); m != nil {
		num, _ := new(big.Int).SetString(m[1], 10)
		den, _ := new(big.Int).SetString(m[2], 10)
		if den.Sign() == 0 {
			return parsedRate{}, fmt.Errorf("%q is not a rate: division by 0", s)
		}
		n.SetFrac(num, den)
	} else if rateNumber.MatchString(number) {
		n.SetString(number)
	} else {
		return parsedRate{}, fmt.Errorf("%q is not a rate: %s", s, rateForm)
	}
	per, err := parsePeriod(period)
	if err != nil {
		return parsedRate{}, fmt.Errorf("%q is not a rate: %w", s, err)
	}
	if n.Sign() == 0 {
		return parsedRate{deny: true}, nil
	}
	if !n.Num().IsUint64() || !n.Denom().IsUint64() {
		return parsedRate{}, fmt.Errorf("%q has more digits than can be counted exactly", s)
	}
	rate, err := bucket.NewRate(n.Num().Uint64(), n.Denom().Uint64(), per)
	if err != nil {
		return parsedRate{}, fmt.Errorf("%q: %w", s, err)
	}
	second := new(big.Rat).Mul(n, big.NewRat(int64(time.Second), int64(per)))
	up := new(big.Int).Add(second.Num(), new(big.Int).Sub(second.Denom(), big.NewInt(1)))
	up.Div(up, second.Denom())
	return parsedRate{rate: rate, perSecond: up.Int64()}, nil // a Rate is at most 1e9 per second
}

func parsePeriod(s string) (time.Duration, error) {
	if s == "s" || s == "m" || s == "h" || s == "d" {
		s = "1" + s
	}
	var d time.Duration
	if m := rateDays.FindStringSubmatch(s); m != nil {
		days, err := strconv.Atoi(m[1])
		if err != nil {
			return 0, errors.New(rateForm)
		}
		d = time.Duration(days) * 24 * time.Hour
	} else {
		if s == "" || s[0] < '0' || s[0] > '9' { // ParseDuration would take a sign
			return 0, errors.New(rateForm)
		}
		var err error
		if d, err = time.ParseDuration(s); err != nil {
			return 0, errors.New(rateForm)
		}
	}
	if d <= 0 {
		return 0, errors.New("its period is nothing")
	}
	return d, nil
}
