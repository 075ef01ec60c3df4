package app

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/alerting/natsfeed"
	"github.com/weirhq/weir/alerting/webhook"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/run"
)

// AlerterConfig says whom to wake. Zero fields: nobody, alerts are stored and logged.
type AlerterConfig struct {
	Webhook  conf.Secret     // its address, which may hold a credential
	Secret   conf.Secret     // signs what is sent; several, separated by spaces, while one is being replaced
	Detector alerting.Config // what is too much
}

// Alerter watches usage and heartbeats and wakes on-call.
type Alerter struct{ nc *nats.Conn }

// NewAlerter starts an alerter on the stack.
func NewAlerter(ctx context.Context, cfg AlerterConfig, nc *nats.Conn, m *Metrics, stack *run.Stack, log *slog.Logger) (*Alerter, error) {
	js, err := natsjs.New(nc)
	if err != nil {
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	if err := natsx.Declare(ctx, js, natsx.Storage{}); err != nil {
		return nil, err
	}
	if cfg.Webhook != "" {
		var secrets []conf.Secret
		for _, s := range strings.Fields(cfg.Secret.Reveal()) {
			secrets = append(secrets, conf.Secret(s))
		}
		to, err := webhook.New(webhook.Config{}, cfg.Webhook, secrets...)
		if err != nil {
			return nil, err
		}
		if len(secrets) == 0 {
			log.Warn("webhooks go out unsigned: set WEIR_WEBHOOK_SECRET or WEIR_WEBHOOK_SECRET_FILE")
		}
		stack.Go("webhook", natsfeed.NewSender(natsfeed.SenderConfig{}, js, to, log, m.alerting).Run)
	}
	stack.Go("detectors", natsfeed.New(natsfeed.Config{}, nc, js, alerting.New(cfg.Detector, m.alerting), log, m.alerting).Run)
	return &Alerter{nc: nc}, nil
}

// Ready says whether the alerter hears anything.
func (a *Alerter) Ready() error {
	if !a.nc.IsConnected() {
		return fmt.Errorf("no connection to NATS")
	}
	return nil
}
