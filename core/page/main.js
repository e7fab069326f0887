setUpTheme();
drawHead();
const browse = drawEpisodes();
drawResults(browse);
drawBreakdown(browse);
drawTraining();
byId("made").textContent = `Made ${report.head.made} by python -m core.report`;
document.documentElement.setAttribute("data-ready", "");
